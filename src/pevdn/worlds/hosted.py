"""What a step of a world outside of JAX must be before it reaches an agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pevdn.agent.interface import AgentSpec
from pevdn.worlds.base import Step


def problem_of(step: Step, agents: Sequence[AgentSpec]) -> str | None:
    """What is wrong with a step, as in "the world … gave an observation …"; None if nothing is.

    Numbers are judged as the 32-bit floats that agents are given. Whoever plays on, or whose
    values are bootstrapped from this step, needs an available action.
    """
    if not isinstance(step, tuple) or len(step) != len(Step._fields):
        return f"gave {type(step).__name__}, not a Step"
    step = Step(*step)
    for name in ("observations", "available"):
        if len(getattr(step, name)) != len(agents):
            return f"gave {name} of {len(getattr(step, name))} agents, not of {len(agents)}"
    for name in ("done", "truncated", "won"):
        if np.shape(getattr(step, name)) != () or getattr(step, name) not in (False, True):
            return f"gave {name}={getattr(step, name)!r}, not true or false"
    if step.truncated and not step.done:
        return "gave truncated=True in an episode that is not done"
    reward = _floats(step.reward)
    if reward is None or reward.shape != ():
        return f"gave the reward {step.reward!r}, not one number for the team"
    if not np.isfinite(reward):
        return f"gave the reward {float(reward)}"
    plays_on = step.truncated or not step.done
    for i, spec in enumerate(agents):
        found = _problem_of_view(step.observations[i], step.available[i], spec, plays_on)
        if found:
            return f"gave agent {i} {found}"
    return None


def _problem_of_view(seen: Any, open_: Any, spec: AgentSpec, plays_on: bool) -> str | None:
    """What is wrong with what one agent sees and may do."""
    numbers = _floats(seen)
    if numbers is None or numbers.shape != (spec.observation_size,):
        shape = "no numbers" if numbers is None else f"shape {numbers.shape}"
        return f"an observation of {shape}, not of shape ({spec.observation_size},)"
    finite = np.isfinite(numbers)
    if not finite.all():
        where = int(np.argmin(finite))
        return f"an observation whose entry {where} is {float(numbers[where])}"
    if np.shape(open_) != (spec.n_actions,):
        shape = np.shape(open_)
        return f"available actions of shape {shape}, not of shape ({spec.n_actions},)"
    if plays_on and not np.any(open_):
        return "no available action"
    return None


def _floats(value: Any) -> np.ndarray | None:
    try:
        with np.errstate(over="ignore"):
            return np.asarray(value, np.float32)
    except (TypeError, ValueError):
        return None
