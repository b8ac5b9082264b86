"""Validate the steps of external worlds, and sanitise them for private training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pevdn.errors import UsageError
from pevdn.worlds.base import ExternalEnv, ExternalWorld, Step, World
from pevdn.worlds.interface import AgentSpec


def require_jax(world: World | ExternalWorld, purpose: str) -> World:
    """Return the world if it is a JAX world, which `purpose` needs; else raise `UsageError`."""
    if isinstance(world, ExternalWorld):
        raise UsageError(
            f"world '{world.name}' is an external world, but {purpose} needs one that compiles; "
            "use a JAX world such as smax-sc2:3m."
        )
    return world


def sanitise(world: ExternalWorld) -> ExternalWorld:
    """Return the world for training with DP: no number that it gives stops the run.

    Stopping would reveal, without noise, that an episode held NaN. Non-finite numbers become 0, and
    an agent without an available action may take any. A world that raises, hangs or returns wrong
    shapes still stops the run: that is an event of the world, not of its data.
    """
    return dataclasses.replace(world, build=SanitisedBuild(world.build))


class SanitisedBuild:
    """Builds environments whose steps are sanitised; picklable if `build` is."""

    def __init__(self, build: Callable[..., ExternalEnv]) -> None:
        self._build = build

    def __call__(self, **options: Any) -> ExternalEnv:
        return SanitisedEnv(self._build(**options))


class SanitisedEnv:
    """An environment whose steps are sanitised."""

    def __init__(self, env: ExternalEnv) -> None:
        self._env = env

    def reset(self, seed: int) -> Step:
        return sanitise_step(self._env.reset(seed))

    def step(self, actions: tuple[int, ...]) -> Step:
        return sanitise_step(self._env.step(actions))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def sanitise_step(step: Step) -> Step:
    """Return the step with finite numbers and an available action; leave malformed ones as is."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            observations: Any = tuple(_finite(observation) for observation in step.observations)
            masks: Any = tuple(np.asarray(mask, bool) for mask in step.available)
            reward: Any = _finite(step.reward)
    except (TypeError, ValueError, AttributeError):
        return step
    masks = tuple(mask if mask.any() else np.ones_like(mask) for mask in masks)
    return step._replace(observations=observations, available=masks, reward=reward)


def _finite(value: Any) -> np.ndarray:
    numbers = np.asarray(value, np.float32)
    return np.where(np.isfinite(numbers), numbers, np.float32(0))


def problem_of(step: Step, agents: Sequence[AgentSpec]) -> str | None:
    """Return what is wrong with a step, such as "returned reward nan", or None.

    Numbers are checked as the 32-bit floats that agents receive. An agent that plays on, or whose
    value is bootstrapped from this step, needs an available action.
    """
    with np.errstate(over="ignore"):
        return _problem_of(step, agents)


def _problem_of(step: Step, agents: Sequence[AgentSpec]) -> str | None:
    if not isinstance(step, tuple) or len(step) != len(Step._fields):
        return f"returned {type(step).__name__}, not a Step"
    observations, available, reward, done, truncated, won = step
    for name, entries in (("observations", observations), ("available", available)):
        if not isinstance(entries, Sequence) or len(entries) != len(agents):
            count = len(entries) if isinstance(entries, Sequence) else "no"
            return f"returned {name} of {count} agents, not of {len(agents)}"
    for name, flag in (("done", done), ("truncated", truncated), ("won", won)):
        if not isinstance(flag, bool | np.bool) and not _is_flag(flag):
            return f"returned {name}={flag!r}, not true or false"
    if truncated and not done:
        return "returned truncated=True without done"
    number = _floats(reward)
    if number is None or number.shape != ():
        return f"returned reward {reward!r}, not one number for the team"
    if not np.isfinite(number):
        return f"returned reward {float(number)}"
    plays_on = bool(truncated) or not done
    for i, (observation, mask, spec) in enumerate(
        zip(observations, available, agents, strict=True)
    ):
        if problem := _problem_of_agent(observation, mask, spec, plays_on):
            return f"gave agent {i} {problem}"
    return None


def _problem_of_agent(observation: Any, mask: Any, spec: AgentSpec, plays_on: bool) -> str | None:
    """Return what is wrong with one agent's observation and available actions, or None."""
    numbers, open_ = _floats(observation), _floats(mask)
    for name, values, size in (
        ("an observation", numbers, spec.observation_size),
        ("available actions", open_, spec.n_actions),
    ):
        if values is None or values.shape != (size,):
            shape = "no numbers" if values is None else f"shape {values.shape}"
            return f"{name} of {shape}, not of shape ({size},)"
    assert numbers is not None and open_ is not None
    finite = np.isfinite(numbers)
    if not finite.all():
        where = int(np.argmin(finite))
        return f"an observation whose entry {where} is {float(numbers[where])}"
    if plays_on and not open_.any():
        return "no available action"
    return None


def _is_flag(value: Any) -> bool:
    return np.shape(value) == () and value in (False, True)


def _floats(value: Any) -> np.ndarray | None:
    try:
        return np.asarray(value, np.float32)
    except (TypeError, ValueError):
        return None
