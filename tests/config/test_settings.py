"""Claims about settings: each has a meaning and a range, and a wrong one is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pevdn.config import experiment as config
from pevdn.config.algorithms import ALGORITHMS
from pevdn.config.experiment import Config, make
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
    assert "choose one of: iql, pe-vdn-a, pe-vdn-b, pe-vdn-c, vdn." in refusal("ppo!")


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
        ("sampling", "poison", "poisson"),
        ("target_update", "softly", "soft"),
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


# --- settings together -----------------------------------------------------------------------


def test_a_minibatch_larger_than_the_buffer_is_refused() -> None:
    message = refusal(buffer_size=16, expected_batch_size=17)
    assert "expected_batch_size is 17" in message and "buffer_size=16" in message


@pytest.mark.parametrize("name", ["parallel_episodes", "update_every"])
def test_the_buffer_must_hold_what_is_played_between_updates(name: str) -> None:
    message = refusal(buffer_size=16, expected_batch_size=4, **{name: 17})
    assert "buffer_size is 16" in message and f"{name}=17" in message


def test_the_buffer_must_hold_a_whole_block_of_episodes() -> None:
    """5 episodes side by side with an update every 4 are played as a block of 8."""
    sizes = {"expected_batch_size": 2, "parallel_episodes": 5, "update_every": 4}
    message = refusal(buffer_size=5, **sizes)
    assert "buffer_size is 5" in message and "8 episodes" in message
    assert "parallel_episodes=5" in message and "update_every=4" in message
    assert "buffer_size is 7" in refusal(buffer_size=7, **sizes)
    made = make("pe-vdn-b", "toy:two-step", 10, settings={"buffer_size": 8, **sizes})
    assert made.block_size == 8


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_block_that_is_checked_is_the_block_that_is_played(parallel: int, every: int) -> None:
    from pevdn import worlds
    from pevdn.simulation.program import Simulation

    settings = {"parallel_episodes": parallel, "update_every": every}
    made = make("pe-vdn-b", "toy:two-step", 10, settings=settings)
    assert Simulation(worlds.make("toy:two-step"), made).block == made.block_size


def test_learning_that_could_never_start_is_refused() -> None:
    message = refusal(buffer_size=64, learning_starts=65)
    assert "learning_starts is 65" in message and "buffer_size=64" in message


def test_exploration_that_would_rise_is_refused() -> None:
    said = refusal(exploration_start=0.1, exploration_end=0.5)
    assert "exploration_end is 0.5" in said
    assert "exploration_start=0.1" in said


def test_a_private_run_refuses_uniform_sampling() -> None:
    message = refusal("pe-vdn-c", sampling="uniform")
    assert message.startswith("sampling is 'uniform', but pe-vdn-c needs 'poisson'")
    assert make("pe-vdn-c").settings.sampling == "poisson"


@given(st.integers(1, 10**9), st.integers(128, 10**6))
def test_delta_is_a_tenth_of_one_over_the_most_episodes_unless_it_is_set(
    steps: int, buffer_size: int
) -> None:
    """Whatever the buffer holds: every episode of the stream is protected."""
    found = make("pe-vdn-c", steps=steps, settings={"buffer_size": buffer_size})
    assert found.delta == 1 / (10 * steps)
    assert make("pe-vdn-c", steps=steps, settings={"delta": "1e-6"}).delta == 1e-6


def test_private_learning_waits_for_a_quarter_of_the_buffer_other_learning_for_a_minibatch() -> (
    None
):
    sizes = {"buffer_size": 100, "expected_batch_size": 10}
    assert make("pe-vdn-c", settings=sizes).learning_starts == 25
    assert make("pe-vdn-b", settings=sizes).learning_starts == 10
    assert make("pe-vdn-c", settings={**sizes, "learning_starts": 20}).learning_starts == 20


def test_what_is_set_wins_over_what_the_algorithm_brings() -> None:
    assert make("pe-vdn-c").settings.buffer_size == 4096
    assert make("pe-vdn-c", settings={"buffer_size": "2000"}).settings.buffer_size == 2000


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


# --- config.yaml -----------------------------------------------------------------------------


def one_value(name: str) -> st.SearchStrategy[Any]:
    meta, default = FIELDS[name].metadata, FIELDS[name].default
    if meta["choices"]:
        return st.sampled_from(meta["choices"])
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return st.integers(meta["low"], min(meta["high"], 2**32))
    return st.floats(meta["low"], min(meta["high"], 1e300))


@st.composite
def configurations(draw: st.DrawFn) -> Config:
    chosen = draw(st.sets(st.sampled_from(sorted(FIELDS))))
    settings = {name: draw(one_value(name)) for name in sorted(chosen)}
    algorithm = draw(st.sampled_from(sorted(ALGORITHMS)))
    if ALGORITHMS[algorithm].private:
        settings["sampling"] = "poisson"
    if not ALGORITHMS[algorithm].private or settings.get("noise_multiplier") == 0:
        settings.pop("epsilon_budget", None)
    kept = ("expected_batch_size", "parallel_episodes", "update_every", "learning_starts")
    settings["buffer_size"] = max(5000, *(settings.get(name, 0) for name in kept))
    start, end = (settings.pop(f"exploration_{x}", v) for x, v in (("start", 1.0), ("end", 0.05)))
    settings |= {"exploration_start": max(start, end), "exploration_end": min(start, end)}
    steps, seeds, seed = draw(
        st.tuples(st.integers(1, 10**9), st.integers(1, 99), st.integers(0, 99))
    )
    return make(algorithm, "toy:two-step", steps, seeds, seed, settings)


@given(configurations())
def test_a_configuration_comes_back_from_disk_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, wanted: Config
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(config.to_text(wanted))
    assert config.load(path) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n- list\n",
        "algorithm: pe-vdn-b\n",
        "algorithm: [unclosed\n",
        "algorithm: 7\nenv: toy:two-step\nsteps: 1\nseeds: 1\nseed: 0\nsettings: {}\n",
        "algorithm: iql\nenv: toy:two-step\nsteps: 1\nseeds: 1\nseed: 0\nsettings: [1]\n",
        b"\xff\xfe\x00",
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=r"config\.yaml is not a run's configuration") as caught:
        config.load(path)
    assert "\n" not in str(caught.value)


def test_a_configuration_edited_by_hand_is_checked_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config.to_text(make("iql")).replace("gamma: 0.99", "gamma: 1.5"))
    with pytest.raises(UsageError, match=r"gamma is 1.5, but must be at most 1\."):
        config.load(path)


def test_a_path_that_holds_no_run_is_told_from_one_that_does(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path, tmp_path / "nothing", file):
        with pytest.raises(UsageError, match="the directory of a run"):
            config.load(path / "config.yaml")
