"""What one agent sees of a world and can do in it: sizes, and how an observation is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EntityGroup:
    """Like entities in an observation, one after the other; one that is all zeros is not seen."""

    start: int  # where the first begins
    count: int
    size: int  # numbers of each
    actions: int | None = None  # the first of `count` actions, one about each thing


@dataclass(frozen=True)
class AgentSpec:
    """The shape of one agent's interface to the world."""

    observation_size: int
    n_actions: int
    entities: tuple[EntityGroup, ...] = ()  # what is known of how an observation is made
