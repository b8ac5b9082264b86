"""The cost of choosing settings by the results of several runs."""

from __future__ import annotations

import dataclasses
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from pevdn.errors import UsageError
from pevdn.privacy import accounting, search
from pevdn.privacy.planner import Plan

RECIPE = Plan(4096, 128, noise_multiplier=1.344, delta=4.88e-4, update_every=4)


@pytest.mark.parametrize("observer", ["agent", "team"])
def test_runs_that_learn_from_the_same_episodes_compose(observer):
    """Equals dp-accounting with every update of every run."""
    step = dp.PoissonSampledDpEvent(
        1 / 32, dp.GaussianDpEvent(RECIPE.mechanism.noise_seen(observer))
    )
    found = [search.all_examined([RECIPE] * k, observer, RECIPE.delta) for k in (1, 2, 10, 50)]
    assert found[0] == RECIPE.epsilon(observer)
    assert found == sorted(found)
    direct = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, 5e-4).compose(step, 10 * 1024)
    assert found[2] == pytest.approx(direct.get_epsilon(RECIPE.delta), rel=2e-3)


def test_runs_with_different_settings_compose():
    other = dataclasses.replace(RECIPE, noise_multiplier=2.0, batch_size=64)
    both = search.all_examined([RECIPE, other], "agent", RECIPE.delta)
    assert RECIPE.epsilon("agent") < both < RECIPE.epsilon("agent") + other.epsilon("agent")
    assert both < search.all_examined([RECIPE, RECIPE], "agent", RECIPE.delta)
    renyi = accounting.composed(
        [some for run in (RECIPE, other) for some in run.mechanism.steps(run.exposure, "agent")],
        RECIPE.delta,
        accountant="rdp",
    )
    assert 0.8 * renyi < both < renyi
    with pytest.raises(UsageError, match="share one relation"):
        swapped = dataclasses.replace(other, relation="replace-one")
        search.all_examined([RECIPE, swapped], "agent", RECIPE.delta)


@pytest.mark.parametrize("observer", ["agent", "team"])
@pytest.mark.parametrize("number", search.NUMBERS)
def test_the_best_of_a_random_number_costs_more_than_one_run_and_less_than_all(observer, number):
    costs = [search.best_examined(RECIPE, k, observer, number) for k in (1, 2, 10, 50, 100, 300)]
    assert costs == sorted(costs)
    assert costs[0] >= RECIPE.epsilon(observer) and costs[1] > RECIPE.epsilon(observer)
    all_of_them = search.all_examined([RECIPE] * 50, observer, RECIPE.delta)
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
        found = search.best_examined(GAUSSIAN, mean, "agent", number)
        assert found == pytest.approx(to_epsilon(renyi + rest + more), rel=1e-6)
    near, mu = np.log1p(1 / (orders - 1)), 1 / noise
    missed = norm.cdf(mu / 2 - near / mu) - np.exp(near) * norm.cdf(-mu / 2 - near / mu)  # δ̂
    least = to_epsilon(renyi + mean * missed + more)  # dp-accounting bounds δ̂ by Rényi divergences
    assert least < search.best_examined(GAUSSIAN, mean, "agent", "poisson") < 2 * least


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
    assert lost(search.best_examined(GAUSSIAN, mean, "agent", number)) <= GAUSSIAN.delta
    assert lost(GAUSSIAN.epsilon("agent")) > GAUSSIAN.delta


def test_a_search_without_updates_costs_nothing_and_without_noise_everything():
    cases = ("fresh", "all", *search.NUMBERS)
    for cost, plan in ((0.0, Plan(64, 4, steps=5)), (math.inf, Plan(64, 4, noise_multiplier=0))):
        assert {row[case] for row in search.report(plan, [1, 5]) for case in cases} == {cost}


def test_private_selection_is_not_known_for_stricter_neighbours():
    row = search.report(Plan(64, 4, relation="replace-one"), [5])[-1]
    assert {row[number] for number in search.NUMBERS} == {None}
    assert row["all"] > row["fresh"] > 0
