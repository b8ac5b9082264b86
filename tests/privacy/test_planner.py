"""Claims about planning: what it will cost, and what a budget affords."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, norm
from support import cli, finish, start

from pevdn.errors import UsageError
from pevdn.privacy import accounting, planner, search
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


def test_the_team_view_is_the_agent_view_with_less_noise():
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


@pytest.mark.parametrize("view", ["agent", "team"])
@pytest.mark.parametrize("target", [0.5, 2.9, 8.0])
def test_the_noise_for_a_target_is_enough_and_no_more(view, target):
    found = budget("--target-epsilon", target, "--view", view)
    assert found[f"epsilon_{view}"] <= target
    less = budget("--noise-multiplier", found["noise_multiplier"] - 0.002)
    assert less[f"epsilon_{view}"] > 0.998 * target


def test_the_batch_for_a_target_is_enough_and_no_more():
    found = budget("--target-epsilon", 2.9, "--noise-multiplier", 2.5)
    assert found["epsilon_team"] <= 2.9
    more = budget("--noise-multiplier", 2.5, "--batch-size", found["batch_size"] + 1)
    assert more["epsilon_team"] > 2.9


def test_a_target_is_for_the_proven_view_unless_the_other_is_asked_for():
    proven = budget("--target-epsilon", 8)
    assert 0.99 * 8 < proven["epsilon_team"] <= 8 and "conditional" not in proven
    other = budget("--target-epsilon", 8, "--view", "agent")
    assert 0.99 * 8 < other["epsilon_agent"] <= 8 < other["epsilon_team"]
    assert "agent observer, whose ε is conditional" in other["conditional"]
    text = " ".join(cli("budget", "--target-epsilon", 8, "--view", "agent").out.split())
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


def test_the_table_names_all_three_views():
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
        (["--target-epsilon", "1", "--view", "teammate"], "A teammate has no ε to aim at"),
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


# ---- a search -------------------------------------------------------------------------------

RECIPE = Plan(4096, 128, noise_multiplier=1.344, delta=4.88e-4, update_every=4)


@pytest.mark.parametrize("view", ["agent", "team"])
def test_runs_that_learn_from_the_same_episodes_compose(view):
    """As dp-accounting says if it is told of every update of every run."""
    step = dp.PoissonSampledDpEvent(1 / 32, dp.GaussianDpEvent(RECIPE.mechanism.noise_seen(view)))
    found = [search.all_looked_at([RECIPE] * k, view, RECIPE.delta) for k in (1, 2, 10, 50)]
    assert found[0] == RECIPE.epsilon(view)
    assert found == sorted(found)
    direct = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, 5e-4).compose(step, 10 * 1024)
    assert found[2] == pytest.approx(direct.get_epsilon(RECIPE.delta), rel=2e-3)


def test_runs_with_different_settings_compose():
    other = dataclasses.replace(RECIPE, noise_multiplier=2.0, batch_size=64)
    both = search.all_looked_at([RECIPE, other], "agent", RECIPE.delta)
    assert RECIPE.epsilon("agent") < both < RECIPE.epsilon("agent") + other.epsilon("agent")
    assert both < search.all_looked_at([RECIPE, RECIPE], "agent", RECIPE.delta)
    renyi = accounting.composed(
        [run.mechanism.steps(run.exposure, "agent") for run in (RECIPE, other)],
        RECIPE.delta,
        accountant="rdp",
    )
    assert 0.8 * renyi < both < renyi
    with pytest.raises(UsageError, match="share one relation"):
        swapped = dataclasses.replace(other, relation="replace-one")
        search.all_looked_at([RECIPE, swapped], "agent", RECIPE.delta)


@pytest.mark.parametrize("view", ["agent", "team"])
@pytest.mark.parametrize("number", search.NUMBERS)
def test_the_best_of_a_random_number_costs_more_than_one_run_and_less_than_all(view, number):
    costs = [search.best_looked_at(RECIPE, k, view, number) for k in (1, 2, 10, 50, 100, 300)]
    assert costs == sorted(costs)
    assert costs[0] >= RECIPE.epsilon(view) and costs[1] > RECIPE.epsilon(view)
    all_of_them = search.all_looked_at([RECIPE] * 50, view, RECIPE.delta)
    assert costs[3] < all_of_them or costs[3] == all_of_them == math.inf


GAUSSIAN = Plan(1, 1, noise_multiplier=2.0, delta=1e-3, agents=1, parallel_episodes=1)


@pytest.mark.parametrize("mean", [3.0, 20.0])
def test_private_selection_follows_the_theorems(mean):
    """Papernot and Steinke's Theorems 2 and 6 by hand; a plain Gaussian has RDP λ / 2σ²."""
    assert (GAUSSIAN.exposure, GAUSSIAN.mechanism.sampling_rate) == (1, 1.0)
    orders = np.array(search.ORDERS)
    noise = GAUSSIAN.noise_multiplier * accounting.EXACTNESS
    renyi = orders / (2 * noise**2)
    more = np.log(mean) / (orders - 1)

    def to_epsilon(curve: np.ndarray) -> float:  # Canonne, Kamath and Steinke (2020), prop. 12
        rest = np.log1p(-1 / orders) - np.log(GAUSSIAN.delta * orders) / (orders - 1)
        return float(np.min(curve + rest))

    for number, eta, gamma in (("logarithmic", 0, log_gamma(mean)), ("geometric", 1, 1 / mean)):
        rest = (1 + eta) * np.min((1 - 1 / orders) * renyi - np.log(gamma) / orders)
        found = search.best_looked_at(GAUSSIAN, mean, "agent", number)
        assert found == pytest.approx(to_epsilon(renyi + rest + more), rel=1e-6)
    near, mu = np.log1p(1 / (orders - 1)), 1 / noise
    missed = norm.cdf(mu / 2 - near / mu) - np.exp(near) * norm.cdf(-mu / 2 - near / mu)  # δ̂
    least = to_epsilon(renyi + mean * missed + more)  # dp-accounting bounds δ̂ by Rényi divergences
    assert least < search.best_looked_at(GAUSSIAN, mean, "agent", "poisson") < 2 * least


def log_gamma(mean: float) -> float:
    """γ of the logarithmic distribution with this mean."""
    return float(brentq(lambda g: (1 - 1 / g) / math.log(g) - mean, 1e-9, 1 - 1e-9))


@pytest.mark.parametrize("number", search.NUMBERS)
@pytest.mark.parametrize("mean", [3.0, 20.0])
def test_the_best_of_a_random_number_of_gaussians_keeps_its_epsilon(number, mean):
    """Exactly, by integration: the largest of K draws has density f(y) G'(F(y)), G being K's PGF.

    And the ε of a single draw would be too little: looking at the best does cost.
    """
    y = np.linspace(-20, 20, 200_001)
    none = [0.0, 0.0]  # probability that no draw is made, the same with and without the episode
    densities = []
    for shift in (0.0, 1 / GAUSSIAN.noise_multiplier):
        below = norm.cdf(y - shift)
        if number == "poisson":
            slope, none = mean * np.exp(mean * (below - 1)), [math.exp(-mean)] * 2
        elif number == "geometric":
            slope = (1 / mean) / (1 - (1 - 1 / mean) * below) ** 2
        else:
            gamma = log_gamma(mean)
            slope = (1 - gamma) / ((1 - (1 - gamma) * below) * math.log(1 / gamma))
        densities.append(norm.pdf(y - shift) * slope)

    def lost(epsilon: float) -> float:
        """δ at this ε, in the worse direction."""
        sides = (densities, densities[::-1])
        return max(np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), y) for p, q in sides)

    assert np.trapezoid(densities[0], y) + none[0] == pytest.approx(1, abs=1e-6)
    assert lost(search.best_looked_at(GAUSSIAN, mean, "agent", number)) <= GAUSSIAN.delta
    assert lost(GAUSSIAN.epsilon("agent")) > GAUSSIAN.delta


def test_a_search_is_part_of_the_plan():
    arguments = ("--buffer-size", 64, "--batch-size", 4, "--runs", 1, "--runs", 5)
    found = budget(*arguments)
    assert [(row["view"], row["runs"]) for row in found["search"]] == [
        (view, runs) for view in ("team", "agent") for runs in (1, 5)
    ]
    for row in found["search"]:
        assert row["fresh"] == found[f"epsilon_{row['view']}"] <= row["logarithmic"]
        assert row["fresh"] <= row["all"] and (row["runs"] > 1 or row["all"] == row["fresh"])
    text = " ".join(cli("budget", *arguments).out.split())
    assert "observer runs fresh all logarithmic geometric poisson" in text
    assert "search" not in budget()


def test_a_search_without_updates_costs_nothing_and_without_noise_everything():
    cases = ("fresh", "all", *search.NUMBERS)
    for cost, plan in ((0.0, Plan(64, 4, steps=5)), (math.inf, Plan(64, 4, noise_multiplier=0))):
        assert {row[case] for row in search.report(plan, [1, 5]) for case in cases} == {cost}


def test_private_selection_is_not_known_for_stricter_neighbours():
    row = search.report(Plan(64, 4, relation="replace-one"), [5])[-1]
    assert {row[number] for number in search.NUMBERS} == {None}
    assert row["all"] > row["fresh"] > 0


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
    known = ("--target-epsilon", 2.9, "--view", "agent", "--delta", 4.88e-4)
    said = finish(start("budget", *known, "--json"))
    assert said.code == 0
    assert json.loads(said.out)["noise_multiplier"] == pytest.approx(1.344, abs=0.0011)
    assert time.monotonic() - began < 20
