"""Agents of the same shape travel together along an array axis; unlike ones travel apart.

A *kind* is a set of agents with equal observation and action sizes. Whatever belongs to agents is
a tuple with one entry per kind, whose arrays have the agents of that kind along one axis. Agent
code is mapped over that axis and never sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from pevdn.worlds.base import AgentSpec


@dataclass(frozen=True)
class Kind:
    spec: AgentSpec
    members: tuple[int, ...]  # which agents of the team


@dataclass(frozen=True)
class Team:
    kinds: tuple[Kind, ...]

    @classmethod
    def of(cls, agents: Sequence[AgentSpec]) -> Team:
        specs = dict.fromkeys(agents)
        return cls(
            tuple(Kind(spec, tuple(i for i, a in enumerate(agents) if a == spec)) for spec in specs)
        )

    def __len__(self) -> int:
        return sum(len(kind.members) for kind in self.kinds)

    def by_kind(self, per_agent: Sequence[Array], axis: int) -> tuple[Array, ...]:
        """One array per agent to one per kind, stacked along `axis`."""
        return tuple(jnp.stack([per_agent[i] for i in kind.members], axis) for kind in self.kinds)

    def by_agent(self, per_kind: Sequence[Array], axis: int) -> tuple[Array, ...]:
        """The way back: one array per agent, in the order of the team."""
        found = {
            i: jnp.take(values, n, axis)
            for kind, values in zip(self.kinds, per_kind, strict=True)
            for n, i in enumerate(kind.members)
        }
        return tuple(found[i] for i in range(len(self)))
