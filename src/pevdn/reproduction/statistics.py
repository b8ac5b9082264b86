"""Statistics over seeds: interquartile means and bootstrap intervals.

Seeds are the first axis of all values. Intervals are 95 % percentile bootstrap intervals over
seeds, deterministic for equal values. With few seeds they are somewhat too narrow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 4000
LEVEL = 0.95
Statistic = Callable[..., Any]  # of an array, along axis=…


def iqm(values: ArrayLike, axis: int = 0) -> Any:
    """Return the interquartile mean: the mean of the middle half, robust to outliers."""
    ordered = np.sort(np.asarray(values, float), axis)
    count = ordered.shape[axis]
    middle = np.arange(count // 4, count - count // 4)
    return np.take(ordered, middle, axis).mean(axis)


def interval(values: ArrayLike, statistic: Statistic = np.mean) -> tuple[Any, Any] | None:
    """Return the interval of a statistic of values (S, ...); None for a single seed."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return None
    return _middle(statistic(_resampled(values, 0), axis=1))


def ratio_interval(above: ArrayLike, below: ArrayLike) -> tuple[Any, Any] | None:
    """Return the interval of mean(above) / mean(below) for two independent groups of seeds."""
    above, below = np.asarray(above, float), np.asarray(below, float)
    if len(above) < 2 or len(below) < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _resampled(above, 0).mean(1) / _resampled(below, 1).mean(1)
    return _middle(ratios[np.isfinite(ratios)]) if np.isfinite(ratios).any() else None


def _resampled(values: NDArray[Any], stream: int) -> NDArray[Any]:
    """Resample with replacement, (R, S, ...); independent of the order of seeds."""
    count = len(values)
    draws = np.random.default_rng((stream, count)).integers(count, size=(RESAMPLES, count))
    drawn: NDArray[Any] = np.sort(values, axis=0)[draws]
    return drawn


def _middle(outcomes: NDArray[Any]) -> tuple[Any, Any]:
    low, high = np.quantile(outcomes, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high
