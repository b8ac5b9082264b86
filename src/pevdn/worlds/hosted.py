"""What a step of a world outside of JAX must be before it reaches an agent, and who takes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pevdn.agent.interface import AgentSpec
from pevdn.errors import UsageError
from pevdn.worlds.base import HostedWorld, Step, World


def inside(world: World | HostedWorld, what: str) -> World:
    """The world, if it is inside of JAX, as `what` needs it."""
    if isinstance(world, HostedWorld):
        raise UsageError(
            f"world '{world.name}' is outside of JAX, but {what} needs one that compiles; take "
            "another, such as smax-sc2:3m."
        )
    return world


def problem_of(step: Step, agents: Sequence[AgentSpec]) -> str | None:
    """What is wrong with a step, as in "the world … gave the reward nan"; None if nothing is.

    Numbers are judged as the 32-bit floats that agents are given. Whoever plays on, or whose
    values are bootstrapped from this step, needs an available action.
    """
    with np.errstate(over="ignore"):
        return _problem_of(step, agents)


def _problem_of(step: Step, agents: Sequence[AgentSpec]) -> str | None:
    if not isinstance(step, tuple) or len(step) != len(Step._fields):
        return f"gave {type(step).__name__}, not a Step"
    observations, available, reward, done, truncated, won = step
    for name, views in (("observations", observations), ("available", available)):
        if not isinstance(views, Sequence) or len(views) != len(agents):
            many = len(views) if isinstance(views, Sequence) else "no"
            return f"gave {name} of {many} agents, not of {len(agents)}"
    for name, flag in (("done", done), ("truncated", truncated), ("won", won)):
        if not isinstance(flag, bool | np.bool) and not _is_flag(flag):
            return f"gave {name}={flag!r}, not true or false"
    if truncated and not done:
        return "gave truncated=True in an episode that is not done"
    number = _floats(reward)
    if number is None or number.shape != ():
        return f"gave the reward {reward!r}, not one number for the team"
    if not np.isfinite(number):
        return f"gave the reward {float(number)}"
    plays_on = bool(truncated) or not done
    for i, (seen, open_, spec) in enumerate(zip(observations, available, agents, strict=True)):
        found = _problem_of_view(seen, open_, spec, plays_on)
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
    mask = _floats(open_)
    if mask is None or mask.shape != (spec.n_actions,):
        shape = "no numbers" if mask is None else f"shape {mask.shape}"
        return f"available actions of {shape}, not of shape ({spec.n_actions},)"
    if plays_on and not mask.any():
        return "no available action"
    return None


def _is_flag(value: Any) -> bool:
    return np.shape(value) == () and value in (False, True)


def _floats(value: Any) -> np.ndarray | None:
    try:
        return np.asarray(value, np.float32)
    except (TypeError, ValueError):
        return None
