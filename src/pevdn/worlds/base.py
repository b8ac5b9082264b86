"""The interface of a world, compiled (JAX) or external.

A world gives each agent its own observation and available actions, and the team one reward. It
never gives one agent's observation to another: the observations of a step are a tuple with one
entry per agent, and the runtimes pass entry i to agent i alone.

Shapes: N agents, O_i the size of agent i's observation, A_i the number of its actions. O_i and A_i
may differ within a team.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from pevdn.worlds.interface import AgentSpec, EntityGroup

if TYPE_CHECKING:
    from jax import Array

__all__ = [
    "AgentSpec",
    "EntityGroup",
    "ExternalEnv",
    "ExternalWorld",
    "Step",
    "World",
    "external_step",
]


class Step(NamedTuple):
    """The result of one step of a world.

    `observations[i]` (O_i,) float and `available[i]` (A_i,) bool belong to agent i alone.
    `done` ends the episode. `truncated` marks an end by the time limit alone: learning bootstraps
    from the last observation.
    """

    observations: tuple[Array, ...]
    available: tuple[Array, ...]
    reward: Array  # () float, the team's
    done: Array  # () bool
    truncated: Array  # () bool, implies done
    won: Array  # () bool, meaningful when done


def external_step(
    observations: Any, available: Any, reward: float, done: bool, truncated: bool, won: bool
) -> Step:
    """Return the step of an external world, with numpy arrays and scalars."""
    numbers: Any = (np.float32(reward), np.bool_(done), np.bool_(truncated), np.bool_(won))
    return Step(tuple(observations), tuple(available), *numbers)


@runtime_checkable
class World(Protocol):
    """A world whose `reset` and `step` are pure JAX functions: whole episodes compile.

    `state` is a pytree of arrays that holds the full state; no agent sees it.
    """

    name: str
    agents: tuple[AgentSpec, ...]
    max_steps: int

    def reset(self, key: Array) -> tuple[Any, Step]:
        """Start an episode; the returned step has reward 0 and done False."""
        ...

    def step(self, key: Array, state: Any, actions: tuple[Array, ...]) -> tuple[Any, Step]:
        """Take one action () int32 per agent."""
        ...


class ExternalEnv(Protocol):
    """One environment of an external world: it keeps its own state and returns numpy arrays.

    An environment that can be drawn also has `render()`, which returns an image (height, width, 3)
    of uint8.
    """

    def reset(self, seed: int) -> Step:
        """Start an episode; equal seeds (31 bits) and actions give equal episodes."""
        ...

    def step(self, actions: tuple[int, ...]) -> Step:
        """Take one action per agent."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ExternalWorld:
    """A world outside JAX: its interface, and a function that builds one environment of it.

    `build` must be picklable unless `max_workers` is 1. If it has a parameter `drawn`, `drawn=True`
    builds an environment with `render()`.
    """

    name: str
    agents: tuple[AgentSpec, ...]
    max_steps: int
    build: Callable[..., ExternalEnv]
    max_workers: int | None = None  # environments that may exist at the same time; None: no limit
