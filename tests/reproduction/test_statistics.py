"""Statistics over seeds: interquartile means and bootstrap intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from pevdn.reproduction import (
    statistics,
)

RATES = st.lists(st.floats(0, 1), min_size=2, max_size=12)


@given(st.floats(0, 1), st.integers(1, 12))
def test_of_equal_seeds_every_statistic_is_that_value(value: float, count: int) -> None:
    values = [value] * count
    assert statistics.iqm(values) == pytest.approx(value)
    bounds = statistics.interval(values)
    assert (bounds is None) == (count == 1)
    assert bounds is None or bounds == pytest.approx((value, value))


@given(RATES, st.randoms())
def test_the_order_of_seeds_does_not_matter(values: list[float], random: Any) -> None:
    mixed = list(values)
    random.shuffle(mixed)
    assert statistics.iqm(mixed) == pytest.approx(statistics.iqm(values))
    assert statistics.interval(mixed) == statistics.interval(values)


@given(RATES)
def test_an_interval_lies_within_the_seeds(values: list[float]) -> None:
    bounds = statistics.interval(values)
    assert bounds is not None
    low, high = bounds
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


@given(RATES, st.floats(0.1, 10))
def test_a_share_does_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    below = [0.5, 0.6, 0.9]
    plain = statistics.ratio_interval(values, below)
    scaled = statistics.ratio_interval([v * unit for v in values], [v * unit for v in below])
    assert scaled == pytest.approx(plain)


def test_the_interquartile_mean_is_the_mean_of_the_middle_half() -> None:
    assert statistics.iqm([9, 1, 2, 3, 4, 5, 6, -70]) == 3.5
    assert statistics.iqm([[0, 8], [1, 9], [5, 5], [9, 1]]) == pytest.approx([3, 6.5])


def test_a_share_of_nothing_has_no_interval() -> None:
    assert statistics.ratio_interval([0.1, 0.2], [0.0, 0.0]) is None


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Nominal 95 %, for 16 seeds between 90 and 97 %; fails twice in a million if that is true."""
    draws = np.random.default_rng(0).normal(size=(400, 16))
    intervals = [statistics.interval(values) for values in draws]
    covered = sum(low <= 0 <= high for low, high in filter(None, intervals))
    assert (
        scipy.stats.binom.ppf(1e-6, 400, 0.90) <= covered <= scipy.stats.binom.isf(1e-6, 400, 0.97)
    )
