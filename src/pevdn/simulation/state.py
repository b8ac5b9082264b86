"""What a simulation passes from step to step, and how a function of one agent is mapped.

Shapes: S lanes, N agents of one kind, E episodes played side by side. Agents' arrays are
(S, N, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.agent.evaluation import Score
from pevdn.agent.learning import Learner
from pevdn.agent.networks import Parameters
from pevdn.agent.replay import Episode

Sums = tuple[tuple[Parameters, ...], Array]  # of gradients by kind, and the largest refused message


class State(NamedTuple):
    """The whole state of a run between two iterations. Counters are (S,)."""

    learners: tuple[Learner, ...]  # by kind, (S, N, ...)
    replays: tuple[Episode, ...]  # by kind, (S, N, buffer_size + 1, ...); empty if on the host
    key: Array  # (S,) random keys
    env_steps: Array
    episodes: Array
    updates: Array
    stored_at: Array  # (S, buffer_size) updates made when a slot was written
    exposure: Array  # the most updates made while any one episode was in the buffer
    exhausted: Array  # bool: an update was due that the privacy budget does not cover
    refused: Array  # the largest message that did not fit, 0 as long as all did
    anchored: Array  # bool: an anchor exists
    threshold: Array  # win rate that the next anchor must beat

    @property
    def params(self) -> tuple[Parameters, ...]:
        return tuple(learner.params for learner in self.learners)


class Played(NamedTuple):
    """A block of episodes, (S, E)."""

    episodes: tuple[Episode, ...]  # by kind, (S, N, E, ...); empty if not recorded
    length: Array
    total_reward: Array
    won: Array

    @property
    def score(self) -> Score:
        """Means over the episodes, (S,)."""
        return Score(self.won.mean(1), self.total_reward.mean(1), self.length.mean(1))


def each_agent(f: Callable[..., Any], *shared: int) -> Callable[..., Any]:
    """Map a function of one agent over (S, N, ...); arguments `shared` are per lane, (S, ...)."""

    def mapped(*args: Any) -> Any:
        over_agents = [None if i in shared else 0 for i in range(len(args))]
        return jax.vmap(jax.vmap(f, in_axes=over_agents))(*args)

    return mapped


def where_lane(condition: Array, new: Any, old: Any) -> Any:
    """Return `new` in the lanes where the condition (S,) holds, `old` in the others."""

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape(-1, *([1] * (a.ndim - 1))), a, b)

    return jax.tree.map(choose, new, old)
