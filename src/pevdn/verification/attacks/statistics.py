"""Estimate the success of an attack, its confidence interval, and the bound that ε implies.

The area under the ROC curve (AUC) is the probability that a positive case gets a higher score than
a negative one: 0.5 is guessing, 1 is certainty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, t

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int_]
Model = Callable[[Floats], Floats]  # inputs (n, D) to scores (n, F)

WAVES = 200  # random Fourier features of the attacker's model
BANDWIDTH = 0.7  # their frequencies, for inputs of unit variance
RIDGE = 2.0


class Estimate(NamedTuple):
    """An AUC with its 95 % confidence interval."""

    auc: float
    low: float
    high: float

    @property
    def contains_chance(self) -> bool:
        return self.low <= 0.5 <= self.high


def estimate(
    scores: Floats, positive: Bools, cluster: Ints, stratum: Ints | None = None, among: int = 1
) -> Estimate:
    """Estimate the AUC and its interval for cases (n,) that depend on each other within a cluster.

    A cluster is an episode, for example. Only cases of the same stratum are compared, such as those
    of the same step. The variance is that of the clusters' influences on the AUC (Obuchowski 1997),
    the quantile is Student's with clusters − 1 degrees of freedom. Of `among` intervals computed
    this way, all hold simultaneously with probability 95 % (Bonferroni). Some stratum must contain
    both answers.
    """
    strata = np.zeros(len(scores), int) if stratum is None else stratum
    won, met = np.zeros(len(scores)), np.zeros(len(scores))
    for one in np.unique(strata):
        here = strata == one
        won[here], met[here] = _comparisons(scores[here], positive[here])
    pairs = met[positive].sum()
    value = float(won[positive].sum() / pairs)
    influence = (won - value * met) / pairs
    _, number = np.unique(cluster, return_inverse=True)
    by_cluster = np.bincount(number, influence)
    clusters = len(by_cluster)
    if clusters < 2:
        return Estimate(value, 0.0, 1.0)
    deviation = math.sqrt(clusters / (clusters - 1) * np.sum(by_cluster**2))
    reach = float(t.ppf(1 - 0.025 / among, clusters - 1)) * deviation
    return Estimate(value, max(0.0, value - reach), min(1.0, value + reach))


def _comparisons(scores: Floats, positive: Bools) -> tuple[Floats, Floats]:
    """Return, per case (n,), its correctly ordered pairs with the other class, and all its pairs.

    Ties count half.
    """
    overall = rankdata(scores)
    within = np.empty_like(overall)
    within[positive], within[~positive] = rankdata(scores[positive]), rankdata(scores[~positive])
    met = np.where(positive, (~positive).sum(), positive.sum()).astype(float)
    below = overall - within  # cases of the other class that score less
    return np.where(positive, below, met - below), met


def largest_auc(guarantees: Iterable[tuple[float, float]]) -> float:
    """Return an upper bound on the AUC of any test if all these (ε, δ) hold.

    Each implies that a test with false positive rate α misses at least
    max(1 − δ − e^ε·α, e^(−ε)·(1 − δ − α), 0) of the positives (Kairouz et al. 2015). The area is
    rounded up.
    """
    false = np.linspace(0.0, 1.0, 10_001)[1:]
    missed = np.zeros_like(false)
    for epsilon, delta in guarantees:
        if epsilon < 700:  # e^ε is finite
            missed = np.maximum(missed, 1 - delta - math.exp(epsilon) * false)
            missed = np.maximum(missed, math.exp(-epsilon) * (1 - delta - false))
    return float(1 - missed.mean())


def learn(inputs: Floats, answers: Bools, seed: int) -> Model:
    """Fit ridge regression on random Fourier features of inputs (n, D) to answers (n, F).

    Inputs are first replaced by their ranks in the training data, which removes units and outliers;
    the features cos(w·x + b) make the model nonlinear.
    """
    generator = np.random.default_rng(seed)
    grid = np.linspace(0.0, 1.0, 201)
    quantiles = np.quantile(inputs, grid, axis=0)  # (201, D)
    frequencies = generator.normal(0.0, BANDWIDTH, (inputs.shape[1], WAVES))
    phases = generator.uniform(0.0, 2 * np.pi, WAVES)

    def waves(x: Floats) -> Floats:
        ranks = [np.interp(x[:, d], quantiles[:, d], grid) for d in range(x.shape[1])]
        spread = (np.stack(ranks, axis=1) - 0.5) * math.sqrt(12)  # variance 1
        features: Floats = np.cos(spread @ frequencies + phases)
        return features

    features = waves(inputs)
    middle = features.mean(axis=0)
    features = features - middle
    curvature = features.T @ features + RIDGE * np.eye(WAVES)
    weights = np.linalg.solve(curvature, features.T @ (answers - answers.mean(axis=0)))
    return lambda x: (waves(x) - middle) @ weights
