"""How sure a few seeds make us: means, interquartile means, and bootstrap intervals.

Values have the seeds along their first axis. Intervals are 95 % percentile intervals over
resampled seeds, always the same for the same values. With few seeds they are somewhat too narrow.
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
    """The interquartile mean: of the middle half, so that one odd seed counts for nothing."""
    ordered = np.sort(np.asarray(values, float), axis)
    count = ordered.shape[axis]
    middle = np.arange(count // 4, count - count // 4)
    return np.take(ordered, middle, axis).mean(axis)


def interval(values: ArrayLike, statistic: Statistic = np.mean) -> tuple[Any, Any] | None:
    """Of a statistic over seeds, for values (S, ...); None for a single seed."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return None
    return _middle(statistic(_resampled(values, 0), axis=1))


def ratio_interval(above: ArrayLike, below: ArrayLike) -> tuple[Any, Any] | None:
    """Of mean(above) / mean(below), two groups of seeds that have nothing to do with each other."""
    above, below = np.asarray(above, float), np.asarray(below, float)
    if len(above) < 2 or len(below) < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _resampled(above, 0).mean(1) / _resampled(below, 1).mean(1)
    return _middle(ratios[np.isfinite(ratios)]) if np.isfinite(ratios).any() else None


def _resampled(values: NDArray[Any], stream: int) -> NDArray[Any]:
    """(R, S, ...): drawn with replacement, R times; in whichever order the seeds come."""
    count = len(values)
    draws = np.random.default_rng((stream, count)).integers(count, size=(RESAMPLES, count))
    drawn: NDArray[Any] = np.sort(values, axis=0)[draws]
    return drawn


def _middle(outcomes: NDArray[Any]) -> tuple[Any, Any]:
    low, high = np.quantile(outcomes, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high
