"""Planning: the ε of a training before it starts, and the settings that a budget allows."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from support import cli, finish, start

from pevdn.errors import UsageError
from pevdn.privacy import planner
from pevdn.privacy.planner import Plan

KEYS = {"epsilon_agent", "epsilon_team", "delta", "noise_multiplier", "theorem_1_epsilon"}


def budget(*arguments: object) -> dict:
    said = cli("budget", *arguments, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_the_papers_buffer_costs_what_is_known():
    found = budget(
        *("--buffer-size", 1024, "--batch-size", 32, "--throughput", 1, "--agents", 3),
        *("--noise-multiplier", 1.0, "--delta", 4.88e-4),
    )
    assert found.keys() >= KEYS
    assert found["epsilon_agent"] == pytest.approx(4.9, abs=0.1)
    assert found["epsilon_agent_rdp"] == pytest.approx(5.6, abs=0.1)
    assert found["exposure"] == 1024
    assert found["epsilon_teammate"] is None and found["teammate"].startswith("none")
    more = budget("--noise-multiplier", 1.5, "--delta", 4.88e-4)
    assert more["epsilon_agent"] == pytest.approx(2.4, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "delta"),
    [
        ([], 1 / 4_000_000),  # of the default training
        (["--steps", 5000], 1 / 50_000),
        (["--episodes", 1000], 1e-4),
        (["--steps", 5000, "--episodes", 1000], 1e-4),
        (["--buffer-size", 64], 1 / 4_000_000),  # the stream counts, not the buffer
        (["--preset", "team-8-long"], 3.125e-8),
        (["--preset", "team-8", "--episodes", 16_000], 1 / 160_000),
        (["--preset", "team-8", "--delta", 1e-9], 1e-9),
    ],
)
def test_delta_is_a_tenth_of_one_over_the_protected_episodes(arguments, delta):
    found = budget(*arguments)
    assert found["delta"] == delta and "note" not in found


def test_a_delta_too_large_for_the_stream_is_named_with_one_that_would_do():
    note = budget("--preset", "paper-c")["note"]
    assert "delta is 0.000488, but should be at most a tenth of one over" in note
    assert "which can be 400,000 here: 2.5e-07 would do" in note
    assert "2.5e-07 would do" in " ".join(cli("budget", "--delta", 1e-3).out.split())
    assert "note" not in budget("--preset", "paper-c", "--delta", 2.5e-7)


def test_the_team_epsilon_is_the_agent_epsilon_with_less_noise():
    team = budget("--noise-multiplier", 2.0, "--agents", 3)["epsilon_team"]
    agent = budget("--noise-multiplier", 2.0 / math.sqrt(3))["epsilon_agent"]
    assert team == pytest.approx(agent, rel=1e-9)


def test_theorem_1_is_marked_unsound_for_a_throughput_above_1():
    found = budget("--throughput", 4, "--noise-multiplier", 0.8)
    assert found["theorem_1_unsound"]
    known = budget("--throughput", 4, "--noise-multiplier", 0.8, "--delta", 1024**-1.1)
    assert known["theorem_1_epsilon"] == pytest.approx(9.2 / 4, abs=0.05)
    assert found["epsilon_agent"] > found["theorem_1_epsilon"]
    assert "not sound" in cli("budget", "--throughput", 4).out.replace("\n", " ")
    assert not budget()["theorem_1_unsound"]


@given(st.integers(8, 200), st.integers(1, 5), st.integers(1, 9), st.floats(1.5, 6.0))
def test_coins_hardly_ever_exceed_a_plan(size, every, parallel, throughput):
    plan = Plan(
        max(size, every * 9, parallel),
        4,
        throughput,
        update_every=every,
        parallel_episodes=parallel,
        steps=10_000,
    )
    coins = dataclasses.replace(plan, throughput=1.0).exposure
    windows = 10_000 / max(every, parallel)
    assert plan.exposure <= coins
    assert windows * binom.sf(plan.exposure, coins, 1 / throughput) <= 1.01e-6 * max(1, every)


def test_a_run_too_short_to_learn_costs_nothing():
    assert budget("--buffer-size", 100, "--batch-size", 10, "--steps", 16)["epsilon_team"] == 0
    short = budget("--buffer-size", 100, "--batch-size", 10, "--steps", 90)
    whole = budget("--buffer-size", 100, "--batch-size", 10)
    assert 0 < short["epsilon_team"] < whole["epsilon_team"]


@pytest.mark.parametrize("observer", ["agent", "team"])
@pytest.mark.parametrize("target", [0.5, 2.9, 8.0])
def test_the_noise_for_a_target_is_enough_and_no_more(observer, target):
    found = budget("--target-epsilon", target, "--view", observer)
    assert found[f"epsilon_{observer}"] <= target
    less = budget("--noise-multiplier", found["noise_multiplier"] - 0.002)
    assert less[f"epsilon_{observer}"] > 0.998 * target


def test_the_batch_for_a_target_is_enough_and_no_more():
    found = budget("--target-epsilon", 2.9, "--noise-multiplier", 2.5)
    assert found["epsilon_team"] <= 2.9
    more = budget("--noise-multiplier", 2.5, "--batch-size", found["batch_size"] + 1)
    assert more["epsilon_team"] > 2.9


def test_a_target_is_for_the_proven_observer_unless_the_other_is_asked_for():
    proven = budget("--target-epsilon", 8)
    assert 0.99 * 8 < proven["epsilon_team"] <= 8 and "conditional" not in proven
    other = budget("--target-epsilon", 8, "--observer", "agent")
    assert 0.99 * 8 < other["epsilon_agent"] <= 8 < other["epsilon_team"]
    assert "agent observer, whose ε is conditional" in other["conditional"]
    text = " ".join(cli("budget", "--target-epsilon", 8, "--observer", "agent").out.split())
    assert "The target is for the agent observer, whose ε is conditional" in text


def test_a_recipe_divided_evenly_costs_the_same():
    """Buffer, batch and update_every by one number: as many updates, sampled as often."""
    whole = Plan(256, 16, delta=0.01, update_every=4)
    even = Plan(64, 4, delta=0.01, parallel_episodes=1)
    assert whole.exposure == even.exposure == 64
    assert whole.epsilon("team") == even.epsilon("team")


@pytest.mark.parametrize("relation", ["add-or-remove", "replace-one"])
def test_stricter_neighbours_cost_more(relation):
    found = budget("--relation", relation)
    assert found["epsilon_team"] > budget()["epsilon_team"]
    assert found["relation"] == relation and "epsilon_agent_rdp" not in found


def test_the_picture_is_drawn(tmp_path):
    path = tmp_path / "curve.png"
    said = cli("budget", "--plot", path)
    assert said.code == 0 and str(path) in said.out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_table_names_all_three_observers():
    text = " ".join(cli("budget").out.split())
    for words in ("proven", "conditional", "teammate none none", "theorem-1", "for comparison"):
        assert words in text
    assert text.index(" team ") < text.index(" agent ") < text.index(" teammate ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--delta", "0"], "delta is 0, but must be between 0 and 1"),
        (["--delta", "1.5"], "delta is 1.5, but must be between 0 and 1"),
        (["--batch-size", "2000"], "batch_size is 2000"),
        (["--throughput", "0.5"], "throughput is 0.5, but must be at least 1"),
        (["--throughput", "nan"], "throughput is nan, but must be at least 1"),
        (["--noise-multiplier", "-1"], "noise_multiplier is -1"),
        (["--noise-multiplier", "inf"], "noise_multiplier is inf"),
        (["--agents", "0"], "agents is 0, but must be at least 1"),
        (["--runs", "0"], "runs is 0, but must be at least 1"),
        (["--steps", "0"], "steps is 0, but must be at least 1"),
        (["--episodes", "0"], "episodes is 0, but must be at least 1"),
        (["--episodes", "9", "--delta", "0.1"], "--delta is 0.1 and --episodes 9, but δ follows"),
        (["--relation", "swap"], "unknown neighbouring relation 'swap'"),
        (["--target-epsilon", "0"], "target_epsilon is 0, but must be a number above 0"),
        (["--target-epsilon", "1", "--observer", "teammate"], "No ε holds for a teammate"),
        (["--target-epsilon", "0.1", "--noise-multiplier", "0.5"], "even a batch of 1"),
        (["--target-epsilon", "1", "--noise-multiplier", "0"], "even a batch of 1"),
        (
            ["--target-epsilon", "1", "--noise-multiplier", "1", "--batch-size", "3"],
            "leave nothing to find",
        ),
    ],
)
def test_bad_input_gets_a_sentence(arguments, sentence):
    said = cli("budget", *arguments)
    assert said.code == 2 and sentence in said.sentence and said.out == ""


def test_a_search_is_part_of_the_plan():
    arguments = ("--buffer-size", 64, "--batch-size", 4, "--runs", 1, "--runs", 5)
    found = budget(*arguments)
    assert [(row["observer"], row["runs"]) for row in found["search"]] == [
        (observer, runs) for observer in ("team", "agent") for runs in (1, 5)
    ]
    for row in found["search"]:
        assert row["fresh"] == found[f"epsilon_{row['observer']}"] <= row["logarithmic"]
        assert row["fresh"] <= row["all"] and (row["runs"] > 1 or row["all"] == row["fresh"])
    text = " ".join(cli("budget", *arguments).out.split())
    assert "observer runs fresh all logarithmic geometric poisson" in text
    assert "search" not in budget()


def test_no_buffer_is_too_large_to_cost_anything():
    assert Plan(buffer_size=2 * 10**7, batch_size=10**5).exposure == 2 * 10**7


def test_hardly_any_noise_is_no_noise():
    assert budget("--noise-multiplier", 0.01)["epsilon_agent"] == "inf"
    assert budget("--noise-multiplier", 0.06)["epsilon_agent"] == "inf"  # above what is proven
    easy = planner.smallest_noise(Plan(8, 2, delta=0.9), 1.0, "agent")
    assert easy.noise_multiplier == pytest.approx(0.05, abs=0.002)


def test_a_target_out_of_reach_is_named():
    with pytest.raises(UsageError, match="no noise multiplier up to"):
        planner.smallest_noise(Plan(buffer_size=64, batch_size=64, delta=1e-30), 1e-6, "team")


def test_a_plan_is_quick(tmp_path: Path):
    """Under two seconds on an idle machine; here with room for a busy one, in a process."""
    began = time.monotonic()
    known = ("--target-epsilon", 2.9, "--observer", "agent", "--delta", 4.88e-4)
    said = finish(start("budget", *known, "--json"))
    assert said.code == 0
    assert json.loads(said.out)["noise_multiplier"] == pytest.approx(1.344, abs=0.0011)
    assert time.monotonic() - began < 20
