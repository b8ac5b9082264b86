"""One agent's interface to a world: the sizes and the structure of its observations and actions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EntityGroup:
    """Consecutive entities of one type in an observation; all zeros means not visible."""

    start: int  # index of the first entity's first number
    count: int
    size: int  # numbers per entity
    actions: int | None = None  # the first of `count` actions, one targeting each entity


@dataclass(frozen=True)
class AgentSpec:
    """The shape of one agent's interface to the world."""

    observation_size: int
    n_actions: int
    entities: tuple[EntityGroup, ...] = ()  # known structure of an observation
