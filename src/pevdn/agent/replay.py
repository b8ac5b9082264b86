"""One agent's replay buffer: its own observations and actions, and the team's rewards.

A replay buffer is an `Episode` whose arrays have a leading axis of `capacity + 1` slots. The newest
episode replaces the oldest. The last slot is scratch: it takes masked-out writes, and the padding
of a minibatch points at it.

Shapes: T maximum steps, O observation, A actions, E episodes stored at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Episode(NamedTuple):
    """One agent's record of one episode: the unit of privacy."""

    observations: Array  # (T + 1, O); entry `length` is the final observation
    available: Array  # (T + 1, A) bool
    actions: Array  # (T,) int16
    rewards: Array  # (T,) the team's
    terminal: Array  # (T,) bool: the game ended here, so do not bootstrap
    length: Array  # () int32
    opened: Array | None = None  # (T,) the opened team error less the agent's own part; pe-vdn-d

    def map(self, f: Callable[[Any], Any]) -> Episode:
        """Apply a function to every array."""
        return Episode._make(None if x is None else f(x) for x in self)


def empty(
    capacity: int, max_steps: int, observation_size: int, n_actions: int, opened: bool = False
) -> Episode:
    """Return a buffer of `capacity` empty episodes and the scratch slot."""
    rows, T = capacity + 1, max_steps
    return Episode(
        observations=jnp.zeros((rows, T + 1, observation_size)),
        available=jnp.zeros((rows, T + 1, n_actions), bool),
        actions=jnp.zeros((rows, T), jnp.int16),
        rewards=jnp.zeros((rows, T)),
        terminal=jnp.zeros((rows, T), bool),
        length=jnp.zeros((rows,), jnp.int32),
        opened=jnp.zeros((rows, T)) if opened else None,
    )


def store(replay: Episode, slots: Array, episodes: Episode) -> Episode:
    """Write E episodes into the slots (E,)."""
    return jax.tree.map(lambda rows, new: rows.at[slots].set(new), replay, episodes)


def fetch(replay: Episode, indices: Array, steps: int) -> Episode:
    """Return a minibatch (T, B, ...): the first `steps` steps of the episodes at `indices` (B,).

    Time is the leading axis, as learning needs it. The scratch slot reads as an empty episode.
    """
    scratch = replay.length.shape[0] - 1

    def first(rows: Array, steps: int) -> Array:
        where = (indices[None, :], jnp.arange(steps)[:, None])  # gather time first: no transpose
        return rows.at[where].get(mode="promise_in_bounds")

    return Episode(
        observations=first(replay.observations, steps + 1),
        available=first(replay.available, steps + 1),
        actions=first(replay.actions, steps),
        rewards=first(replay.rewards, steps),
        terminal=first(replay.terminal, steps),
        length=jnp.where(indices == scratch, 0, replay.length[indices]),
        opened=None if replay.opened is None else first(replay.opened, steps),
    )


def shorten(episodes: Episode, steps: int) -> Episode:
    """Cut episodes (B, T, ...) to `steps` steps; none may be longer."""
    return Episode(
        observations=episodes.observations[:, : steps + 1],
        available=episodes.available[:, : steps + 1],
        actions=episodes.actions[:, :steps],
        rewards=episodes.rewards[:, :steps],
        terminal=episodes.terminal[:, :steps],
        length=episodes.length,
        opened=None if episodes.opened is None else episodes.opened[:, :steps],
    )


def time_first(episodes: Episode) -> Episode:
    """Transpose stored episodes (B, T, ...) to a minibatch (T, B, ...)."""
    batch: Episode = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, episodes)
    return batch
