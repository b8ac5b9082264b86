"""What a step of a world outside of JAX must be before it reaches an agent, and who takes none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pevdn.errors import UsageError
from pevdn.worlds.base import ExternalEnv, ExternalWorld, Step, World
from pevdn.worlds.interface import AgentSpec


def inside(world: World | ExternalWorld, what: str) -> World:
    """The world, if it is inside of JAX, as `what` needs it."""
    if isinstance(world, ExternalWorld):
        raise UsageError(
            f"world '{world.name}' is outside of JAX, but {what} needs one that compiles; take "
            "another, such as smax-sc2:3m."
        )
    return world


def unstoppable(world: ExternalWorld) -> ExternalWorld:
    """The same world, for training with DP: no number that it gives stops the run.

    That an episode held NaN would become known without noise. Numbers that are not finite count as
    0, and an agent without an available action may do anything. A world that raises, hangs, or
    gives other shapes is still stopped: that is an event of the world and not of its data.
    """
    return dataclasses.replace(world, build=Mending(world.build))


class Mending:
    """Builds copies of a world whose steps are mended."""

    def __init__(self, build: Callable[..., ExternalEnv]) -> None:
        self._build = build

    def __call__(self, **how: Any) -> ExternalEnv:
        return Mended(self._build(**how))


class Mended:
    """A copy of a world, and in front of it what mends its steps."""

    def __init__(self, env: ExternalEnv) -> None:
        self._env = env

    def reset(self, seed: int) -> Step:
        return mended(self._env.reset(seed))

    def step(self, actions: tuple[int, ...]) -> Step:
        return mended(self._env.step(actions))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def mended(step: Step) -> Step:
    """The step with finite numbers and an available action; one of another form as it is."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            seen: Any = tuple(_finite(view) for view in step.observations)
            masks: Any = tuple(np.asarray(mask, bool) for mask in step.available)
            reward: Any = _finite(step.reward)
    except (TypeError, ValueError, AttributeError):
        return step
    masks = tuple(mask if mask.any() else np.ones_like(mask) for mask in masks)
    return step._replace(observations=seen, available=masks, reward=reward)


def _finite(value: Any) -> np.ndarray:
    numbers = np.asarray(value, np.float32)
    return np.where(np.isfinite(numbers), numbers, np.float32(0))


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
