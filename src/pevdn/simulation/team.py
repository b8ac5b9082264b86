"""How the arrays of a team are laid out: one array axis per kind of agent.

A *kind* is a set of agents with equal observation and action sizes. Agents' data is a tuple with
one entry per kind, whose arrays have the agents of that kind along one axis. Agent code is mapped
over that axis and never sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.worlds.interface import AgentSpec


@dataclass(frozen=True)
class Kind:
    """Agents of equal shape."""

    spec: AgentSpec
    members: tuple[int, ...]  # which agents of the team


@dataclass(frozen=True)
class TeamLayout:
    """The kinds of a team; `len` is the number of agents."""

    kinds: tuple[Kind, ...]

    @classmethod
    def of(cls, agents: Sequence[AgentSpec]) -> TeamLayout:
        specs = dict.fromkeys(agents)
        return cls(
            tuple(Kind(spec, tuple(i for i, a in enumerate(agents) if a == spec)) for spec in specs)
        )

    def __len__(self) -> int:
        return sum(len(kind.members) for kind in self.kinds)

    def by_kind(self, per_agent: Sequence[Array], axis: int) -> tuple[Array, ...]:
        """Stack one array per agent into one per kind, along `axis`."""
        return tuple(jnp.stack([per_agent[i] for i in kind.members], axis) for kind in self.kinds)

    def by_agent(self, per_kind: Sequence[Array], axis: int) -> tuple[Array, ...]:
        """Unstack: one array per agent, in the order of the team."""
        found = {
            i: jnp.take(values, n, axis)
            for kind, values in zip(self.kinds, per_kind, strict=True)
            for n, i in enumerate(kind.members)
        }
        return tuple(found[i] for i in range(len(self)))

    def shapes(self, of_agent: Callable[[AgentSpec], Any], *before: int) -> tuple[Any, ...]:
        """Return, by kind, the shapes of one agent's arrays with leading axes (*before, N)."""

        def of_kind(kind: Kind) -> Any:
            axes = (*before, len(kind.members))
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(axes + x.shape, x.dtype),
                jax.eval_shape(lambda: of_agent(kind.spec)),
            )

        return tuple(map(of_kind, self.kinds))
