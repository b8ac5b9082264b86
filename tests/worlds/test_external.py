"""What the step of an external world must be, and what is sanitised for private training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny_worlds as tiny

from pevdn.worlds.base import Step
from pevdn.worlds.external import problem_of, sanitise
from pevdn.worlds.workers import RESET, STEP, WorkerPool


def a_step(**changes: Any) -> Step:
    observations, masks = (np.zeros(3), np.ones(3)), (np.ones(2, bool), np.array([True, False]))
    return Step(observations, masks, 0.5, False, False, False)._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"reward": np.float64(1)}, None),
        ({"reward": [1.0, 1.0]}, "returned reward [1.0, 1.0], not one number for the team"),
        ({"reward": 1e39}, "returned reward inf"),
        ({"reward": None}, "returned reward nan"),
        ({"done": np.array(True)}, None),
        ({"done": 2}, "returned done=2, not true or false"),
        ({"truncated": True}, "returned truncated=True without done"),
        ({"observations": (np.zeros(3),)}, "returned observations of 1 agents, not of 2"),
        ({"observations": (np.zeros(3), ["a", "b", "c"])}, "gave agent 1 an observation of no num"),
        ({"available": (np.ones(2), np.ones(3))}, "gave agent 1 available actions of shape (3,)"),
        ({"available": (np.zeros(2), np.ones(2))}, "gave agent 0 no available action"),
        ({"available": (np.zeros(2), np.ones(2)), "done": True}, None),
        (
            {"available": (np.zeros(2), np.ones(2)), "done": True, "truncated": True},
            "gave agent 0 no available action",
        ),
    ],
)
def test_what_is_wrong_with_a_step(changes: dict[str, Any], problem: str | None) -> None:
    found = problem_of(a_step(**changes), tiny.TWO_STEP.agents)
    assert found == problem or (problem is not None and str(found).startswith(problem))


def test_what_is_no_step_at_all() -> None:
    nothing: Any = None
    assert problem_of(nothing, tiny.TWO_STEP.agents) == "returned NoneType, not a Step"


@pytest.mark.parametrize("how", [tiny.pays_nan, tiny.sees_infinity, tiny.offers_nothing])
def test_with_dp_no_number_of_a_world_stops_training(how: Callable[..., Any]) -> None:
    """Numbers that are not finite are 0, and an agent that may do nothing may do anything."""
    pool = WorkerPool(sanitise(tiny.failing(how, after=1)), 1, 60.0)
    try:
        pool.rows["order"] = RESET
        pool.turn()
        pool.rows["order"] = STEP
        pool.turn()
        (row,) = pool.rows
        assert np.isfinite(row["reward"]) and np.isfinite(row["observations"]).all()
        assert row["available"].reshape(2, 2).any(axis=1).all()
    finally:
        pool.close()
