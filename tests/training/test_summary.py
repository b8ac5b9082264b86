"""Claims about the figures of a run: means, intervals and curves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from pevdn.training import figures, metrics
from pevdn.training import summary as report

# --- figures to quote ------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_confidence_is_students(values: list[float]) -> None:
    mean, half = report.confidence(values)
    assert mean == pytest.approx(np.mean(values))
    error = scipy.stats.sem(values)
    wanted = scipy.stats.t.interval(0.95, len(values) - 1, mean, error)[1] - mean if error else 0
    assert half == pytest.approx(wanted, abs=1e-9)


def test_one_value_has_no_spread() -> None:
    assert report.confidence([0.25]) == (0.25, None)


def test_the_final_mean_covers_the_last_window_or_the_last_quarter() -> None:
    steps = [100 * n for n in range(11)]
    values = [n / 1000 for n in steps]
    assert report.final_mean(steps, values) == pytest.approx(0.9)  # of 800, 900 and 1000
    long = [1000 * n for n in steps]  # the last 100,000 of a million
    assert report.final_mean(long, values) == 1.0
    assert report.final_mean([0], [0.5]) == 0.5
    assert report.final_mean(steps, [None] * 11) is None
    assert report.final_mean(steps, [None] * 10 + [0.5]) == 0.5
    assert report.final_mean(steps, [0.5] + [None] * 10) is None


def test_the_curve_in_text_has_its_shape() -> None:
    rising = figures.text_curve([(0, 0.0), (500, 0.5), (1000, 1.0)], width=20, height=4)
    *rows, axis, label = rising.splitlines()
    assert len(rows) == 4 and {len(row) for row in [*rows, axis, label]} == {25}
    assert rows[0].startswith("1.0 │") and rows[3].startswith("0.0 │")
    assert label.endswith("1,000 steps")
    heights = [sum(row[5 + x] == "█" for row in rows) for x in range(20)]
    assert heights == [0] * 10 + [2] * 9 + [4]
    assert figures.text_curve([]) == ""


def test_a_mean_curve_waits_for_the_slowest_seed() -> None:
    def line(seed: int, steps: int, rate: float | None) -> dict[str, Any]:
        return {"seed": seed, "env_steps": steps, "win_rate_anchor": rate}

    lines = [line(0, 0, None), line(1, 0, None), line(0, 10, 0.5), line(1, 20, None)]
    lines.append(line(0, 30, 1.0))
    assert figures.mean_curve(lines, "win_rate_anchor") == [(15, 0.5)]


def test_epsilon_over_seeds_is_the_worst_and_everything_else_the_mean() -> None:
    lines = [{"win_rate": 0.0, "epsilon_team": 1.0}, {"win_rate": 1.0, "epsilon_team": 3.0}]
    assert metrics.mean_of_seeds(lines) == {"win_rate": 0.5, "epsilon_team": 3.0}
