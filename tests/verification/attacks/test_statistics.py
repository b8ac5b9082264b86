"""Statistics of attacks: AUC, intervals, and the bound by ε."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attacked import generator
from scipy.stats import mannwhitneyu, norm

from pevdn.verification.attacks import statistics
from pevdn.verification.attacks.statistics import estimate, largest_auc


def test_the_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    scores, positive = np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, True, False, True])
    assert estimate(scores, positive, np.arange(4)).auc == pytest.approx((1 + 0.5 + 1 + 1) / 4)


def test_the_auc_agrees_with_another_implementation() -> None:
    scores = generator().normal(size=200).round(1)  # with ties
    positive = generator(1).random(200) < 0.3
    wins = mannwhitneyu(scores[positive], scores[~positive]).statistic
    pairs = positive.sum() * (~positive).sum()
    assert estimate(scores, positive, np.arange(200)).auc == pytest.approx(wins / pairs)


def dependent_cases(seed: int, effect: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """40 episodes of 15 steps; what an episode has in common moves scores and answers."""
    random = generator(seed)
    common = random.normal(size=(40, 1))
    positive = random.random((40, 15)) < 1 / (1 + np.exp(-2 * common))
    scores = random.normal(size=(40, 1)) + random.normal(size=(40, 15)) + effect * positive
    return scores.ravel(), positive.ravel(), np.repeat(np.arange(40), 15)


@pytest.mark.parametrize("effect", [0.0, 1.5])
def test_the_interval_covers_the_truth_although_steps_of_an_episode_depend(effect: float) -> None:
    truth = norm.cdf(effect / 2)  # two scores differ with variance 4
    found = [estimate(*dependent_cases(seed, effect)) for seed in range(400)]
    covered = np.mean([x.low <= truth <= x.high for x in found])
    assert 0.92 < covered < 0.98
    naive = []
    for seed in range(100):
        scores, positive, _ = dependent_cases(seed, effect)
        x = estimate(scores, positive, np.arange(len(scores)))
        naive.append(x.low <= truth <= x.high)
    assert np.mean(naive) < 0.85  # taking steps for independent would be too sure


def test_intervals_that_hold_at_once_are_wider() -> None:
    cases = dependent_cases(0, 0.0)
    alone, many = estimate(*cases), estimate(*cases, among=18)
    assert alone.auc == many.auc
    assert many.low < alone.low < alone.high < many.high


def test_only_cases_of_the_same_stratum_are_compared() -> None:
    random = generator()
    step = random.integers(0, 10, 500)
    positive = random.random(500) < step / 10
    assert estimate(1.0 * step, positive, np.arange(500)).auc > 0.7
    assert estimate(1.0 * step, positive, np.arange(500), step).auc == 0.5
    scores = random.normal(size=500) + 2 * positive
    pairs = [
        (scores[i] > scores[j], True)
        for i in np.nonzero(positive)[0]
        for j in np.nonzero(~positive & (step == step[i]))[0]
    ]
    known = np.mean([won for won, _ in pairs])
    assert estimate(scores, positive, np.arange(500), step).auc == pytest.approx(known)


def test_differential_privacy_bounds_the_auc() -> None:
    assert largest_auc([(0.0, 0.0)]) == pytest.approx(0.5, abs=2e-4)
    assert largest_auc([]) == largest_auc([(math.inf, 1e-5)]) == 1.0
    for epsilon, delta in ((1.0, 0.0), (1.0, 0.01), (3.0, 1e-5), (0.2, 0.3)):
        kite = (1 - delta) ** 2 / (1 + math.exp(epsilon))  # what the best ROC curve leaves
        assert 1 - kite <= largest_auc([(epsilon, delta)]) < 1 - kite + 1e-3


def test_many_guarantees_bound_the_auc_of_a_gaussian_tightly() -> None:
    mu = 0.5  # two normal distributions so far apart have an AUC of Φ(μ/√2)
    deltas = [
        (e, norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu))
        for e in np.linspace(0, 3, 31)
    ]
    truth = norm.cdf(mu / math.sqrt(2))
    assert truth <= largest_auc(deltas) < truth + 2e-3


def test_the_attackers_model_combines_inputs() -> None:
    x = generator().normal(size=(4000, 2)) * [1.0, 1e6]
    target = (x[:, 0] > 0) ^ (x[:, 1] > 0)
    scores = statistics.learn(x[:2000], target[:2000, None], seed=0)(x[2000:])
    assert estimate(scores[:, 0], target[2000:], np.arange(2000)).auc > 0.95
