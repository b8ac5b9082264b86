"""What a world is: the only thing a team sees of its environment.

A world hands every agent its own observation and its own available actions, and the team one
reward. It never hands one agent's observation to another: the views of a step are a tuple with
one entry per agent, and the runtime passes entry i to agent i alone.

Shapes: N agents, O_i the size of agent i's observation, A_i the number of its actions.
Agents may be unlike each other: O_i and A_i may differ within a team.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from pevdn.worlds.interface import AgentSpec, EntityGroup

if TYPE_CHECKING:
    from jax import Array

__all__ = ["AgentSpec", "EntityGroup", "ExternalEnv", "ExternalWorld", "Step", "World", "host_step"]


class Step(NamedTuple):
    """What the team gets from one step of a world.

    `observations[i]` (O_i,) float and `available[i]` (A_i,) bool belong to agent i alone.
    `done` ends the episode; `truncated` says that only the clock ended it, so that values are
    still bootstrapped from the last observation.
    """

    observations: tuple[Array, ...]
    available: tuple[Array, ...]
    reward: Array  # () float, the team's
    done: Array  # () bool
    truncated: Array  # () bool, implies done
    won: Array  # () bool, meaningful when done


def host_step(
    observations: Any, available: Any, reward: float, done: bool, truncated: bool, won: bool
) -> Step:
    """A step of a world outside of JAX: the same with numpy's arrays and numbers."""
    numbers: Any = (np.float32(reward), np.bool_(done), np.bool_(truncated), np.bool_(won))
    return Step(tuple(observations), tuple(available), *numbers)


@runtime_checkable
class World(Protocol):
    """A world whose `reset` and `step` are pure JAX functions, so that whole episodes compile.

    `state` is any pytree of arrays; it holds everything, and no agent ever sees it.
    """

    name: str
    agents: tuple[AgentSpec, ...]
    max_steps: int

    def reset(self, key: Array) -> tuple[Any, Step]:
        """Start an episode; the returned step carries reward 0 and done False."""
        ...

    def step(self, key: Array, state: Any, actions: tuple[Array, ...]) -> tuple[Any, Step]:
        """Play one action () int32 per agent."""
        ...


class ExternalEnv(Protocol):
    """One copy of a world outside of JAX: it keeps its own state, and its arrays are numpy's.

    A copy that can be drawn also has `render()`, a picture (height, width, 3) of uint8.
    """

    def reset(self, seed: int) -> Step:
        """Start an episode; the same seed (31 bits) and actions give the same episode."""
        ...

    def step(self, actions: tuple[int, ...]) -> Step:
        """Play one action per agent."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ExternalWorld:
    """A world outside of JAX: what the team needs to know of it, and how a copy is made."""

    name: str
    agents: tuple[AgentSpec, ...]
    max_steps: int
    build: Callable[..., ExternalEnv]  # can be pickled, unless there is one copy at most; takes
    # drawn=True for a copy that can be drawn, if the world can
    copies: int | None = None  # the most that can exist side by side; None: any number
