"""Measures of finished runs, computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from campaigns import lines_of

from pevdn.config import experiment as config
from pevdn.reproduction import (
    measure,
    paper,
)
from pevdn.reproduction.measure import Curves


def test_the_papers_curves_have_their_published_means() -> None:
    ours = {name: f"{measure.published(name).final[0]:.3f}" for name in ("iql", "vdn", "pe-vdn-b")}
    assert ours == {"iql": "0.847", "vdn": "0.936", "pe-vdn-b": "0.991"}
    assert f"{measure.published('pe-vdn-c-anchor').final[0]:.3f}" == "0.755"
    assert {len(curve.steps) for p in "ab" for curve in paper.curves(p).values()} == {81}
    assert paper.curve("qmix") is None


def test_final_area_and_steps_to_80_by_hand() -> None:
    steps = np.arange(9) * 50_000  # the last 100,000 are the last two evaluations
    rising = [0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1]
    curves = Curves(steps, np.array([rising, [0.5] * 9]))
    assert curves.final.tolist() == [1, 0.5]
    # trapezia: half of the ends and all between
    assert curves.area.tolist() == pytest.approx([(0.5 + 5) / 8, 0.5])
    # means of five: …, (0.4+0.6+0.8+1+1)/5 = 0.76, (0.6+0.8+1+1+1)/5 = 0.88
    assert curves.reached.tolist() == [350_000, math.inf]
    row = measure.learning(curves, None)
    assert (row["win_rate"], row["steps_to_80"], row["seeds_at_80"]) == (0.75, None, 1)
    assert (row["win_rate_low"], row["win_rate_high"]) == (0.5, 1)


def test_a_short_run_is_measured_over_its_last_quarter() -> None:
    curves = Curves(np.arange(5) * 100, np.array([[0, 0, 0, 1, 0.5]]))
    assert curves.final.tolist() == [0.5]


def test_a_model_that_is_not_there_yet_wins_nothing() -> None:
    lines = lines_of([[None, None, 0.5], [None, 1, 1]], 30, "win_rate_anchor")
    models = measure.curves_of(config.make("pe-vdn-c", settings={"eval_every": 30}), lines)
    assert list(models) == ["running", "anchor"]
    assert models["anchor"].values.tolist() == [[0, 0, 0.5], [0, 1, 1]]
    assert measure.released(models) == "anchor"
    assert measure.released(["running", "anchor", "average"]) == "anchor"


@pytest.mark.parametrize(
    ("algorithm", "messages", "size"),
    # Two agents, 100 updates of 4 episodes of 3 steps. The central node gets 300 steps of an
    # observation of 5 or 6 numbers, a byte of available actions and two of the action.
    [
        ("iql", 0, 4),
        ("vdn", 300, 4 * 5.5 + 3),
        ("pe-vdn-a", 1200, 4),
        ("pe-vdn-b", 2400, 4),
    ],
)
def test_what_an_agent_sends_by_hand(algorithm: str, messages: float, size: float) -> None:
    settings = {"expected_batch_size": 4, "eval_every": 30}
    wanted = config.make(algorithm, "toy:coordination", 300, settings=settings)
    found = measure.traffic(wanted, lines_of([[0.0] * 11], 30))
    assert found["messages_per_agent"] == pytest.approx(messages)
    assert found["bytes_per_agent"] == pytest.approx(messages * size)


def test_a_poisson_sample_is_as_large_as_the_buffer_is_full() -> None:
    settings = {"buffer_size": 50, "expected_batch_size": 5, "eval_every": 30}
    wanted = config.make("pe-vdn-c", "toy:coordination", 300, settings=settings)
    # q = 0.1; ten episodes, and updates, from one line to the next: 5, 15, 25, 35, 45 are stored
    # in the middle of the first five, then all 50.
    stored = 5 + 15 + 25 + 35 + 45 + 5 * 50
    found = measure.sampled_steps(wanted, lines_of([[0.0] * 11], 30))
    assert found == pytest.approx(0.1 * stored * 10 * 3)
