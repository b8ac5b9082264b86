"""Claims about settings: each has a meaning and a range, and a wrong one is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pevdn.config.algorithms import ALGORITHMS
from pevdn.config.experiment import make
from pevdn.config.settings import parse_assignments, setting_fields
from pevdn.errors import UsageError

FIELDS = setting_fields()
NUMBERS = [name for name, field in FIELDS.items() if type(field.default) in (int, float)]


def refusal(*args: Any, **settings: Any) -> str:
    """Why a configuration is refused."""
    with pytest.raises(UsageError) as caught:
        make(*(args or ("pe-vdn-b", "toy:two-step")), settings=settings)
    return str(caught.value)


# --- one setting -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_says_what_it_means(name: str) -> None:
    meaning = FIELDS[name].metadata["meaning"]
    assert len(meaning.split()) >= 2, f"{name}: '{meaning}'"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_defaults_of_every_algorithm_are_accepted_when_typed_out(algorithm: str) -> None:
    settings = make(algorithm).settings
    typed = {name: str(getattr(settings, name)) for name in FIELDS}
    assert make(algorithm, settings=typed).settings == settings


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("gama", "gamma"), ("batch_size", "expected_batch_size"), ("clipnorm", "clip_norm")],
)
def test_an_unknown_setting_names_the_nearest(wrong: str, right: str) -> None:
    assert f"unknown setting '{wrong}'; did you mean '{right}'?" in refusal(**{wrong: 1})


def test_an_unknown_algorithm_names_the_nearest() -> None:
    assert "unknown algorithm 'pevdn-c'; did you mean 'pe-vdn-c'?" in refusal("pevdn-c")


def test_a_name_like_no_other_lists_the_choices() -> None:
    assert "choose one of: iql, pe-vdn-a, pe-vdn-b, pe-vdn-c, pe-vdn-d, vdn." in refusal("ppo!")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_is_named_with_its_bound(name: str) -> None:
    meta, kind = FIELDS[name].metadata, type(FIELDS[name].default)
    low, high = meta["low"], meta["high"]
    assert math.isfinite(low), f"{name} may be anything"
    below = kind(low - 1)
    assert f"{name} is {below}, but must be at least {low:.10g}." in refusal(**{name: below})
    if math.isfinite(high):
        above = kind(high + 1)
        assert f"{name} is {above}, but must be at most {high:.10g}." in refusal(**{name: above})


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("gamma", "high", "a number"),
        ("gamma", "nan", "a number"),
        ("learning_rate", "inf", "a number"),
        ("learning_rate", None, "a number"),
        ("buffer_size", "12.5", "a whole number"),
        ("buffer_size", "1e400", "a whole number"),
        ("buffer_size", True, "a whole number"),
        ("modulus", "2**", "a whole number"),
        ("double_q", "maybe", "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_says_which_is_wanted(name: str, value: Any, wanted: str) -> None:
    assert refusal(**{name: value}) == f"{name} is '{value}', but must be {wanted}."


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("optimizer", "adamw", "adam"),
        ("network", "entity", "entities"),
        ("relation", "zeroout", "zero-out"),
    ],
)
def test_a_wrong_choice_names_the_nearest(name: str, value: str, near: str) -> None:
    assert f"unknown value of {name}: '{value}'; did you mean '{near}'?" in refusal(**{name: value})


@pytest.mark.parametrize(
    ("steps", "seeds", "seed", "named"),
    [
        (0, 1, 0, "steps is 0, but must be at least 1."),
        (10**10, 1, 0, "steps is 10000000000, but must be at most 2000000000."),
        ("many", 1, 0, "steps is 'many', but must be a whole number."),
        (1, 0, 0, "seeds is 0, but must be at least 1."),
        (1, 1, -1, "seed is -1, but must be at least 0."),
        (1, 1, 2**32, "seed is 4294967296, but must be at most 2000000000."),
    ],
)
def test_steps_and_seeds_are_checked_too(steps: Any, seeds: Any, seed: Any, named: str) -> None:
    assert refusal("iql", "toy:two-step", steps, seeds, seed) == named


# --- as typed --------------------------------------------------------------------------------


def test_assignments_are_split_at_the_first_equals_sign() -> None:
    assert parse_assignments(["gamma=0.9", " optimizer = sgd ", "a=b=c"]) == {
        "gamma": "0.9",
        "optimizer": "sgd",
        "a": "b=c",
    }


@pytest.mark.parametrize("text", ["gamma", "=0.9", ""])
def test_an_assignment_without_a_name_or_an_equals_sign_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"takes name=value, as in gamma=0\.95"):
        parse_assignments([text])


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("modulus", "2**31-1", 2**31 - 1),
        ("modulus", "2**32", 2**32),
        ("buffer_size", "5_000", 5000),
        ("exploration_steps", "1e5", 100_000),
        ("gamma", "1", 1.0),
        ("learning_rate", "5e-4", 5e-4),
        ("double_q", "No", False),
        ("anchor", "true", True),
    ],
)
def test_values_may_be_written_the_way_people_write_them(
    name: str, text: str, value: object
) -> None:
    found = getattr(make("pe-vdn-b", settings={name: text}).settings, name)
    assert found == value and type(found) is type(value)


def test_an_absurd_power_is_refused_at_once() -> None:
    assert "must be at most 4294967296" in refusal(modulus="2**99999999999")


# --- names of earlier versions ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("buffer", "buffer"),
        ("envs", "workers"),
        ("world_timeout", "world_timeout"),
        ("checkpoint_every", "checkpoint_every"),
    ],
)
def test_a_runtime_option_is_no_setting_and_says_how_to_give_it(name: str, option: str) -> None:
    flag = option.replace("_", "-")
    assert refusal(**{name: 1}) == (
        f"{name} is a runtime option, not a setting; use --{flag}, or {option}=… in Python."
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("clipping", "gradients are always clipped as a whole"),
        ("sampling", "it follows from the algorithm"),
        ("target_update", "the target network always moves by target_rate"),
        ("target_every", "the target network always moves by target_rate"),
    ],
)
def test_a_removed_setting_says_why_it_is_gone(name: str, why: str) -> None:
    said = refusal(**{name: "soft"})
    assert said.startswith(f"{name} was removed, because {why}") and said.endswith("leave it out.")


def test_a_renamed_setting_says_its_new_name() -> None:
    assert refusal(budget_view="team") == "budget_view was renamed; set budget_observer instead."
