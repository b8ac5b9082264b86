"""One agent's episodes: what it saw, did and was told of the team's reward; nobody else's.

A replay is an `Episode` whose arrays have one more axis in front, `capacity + 1` long. The newest
episode replaces the oldest. The last slot is scratch: writes that must not happen go there, and
it is what the padding of a minibatch points at.

Shapes: T steps at most, O observation, A actions, E episodes stored at once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Episode(NamedTuple):
    """One episode of one agent: the unit of privacy."""

    observations: Array  # (T + 1, O); entry `length` is the last thing seen
    available: Array  # (T + 1, A) bool
    actions: Array  # (T,) int16
    rewards: Array  # (T,) the team's
    terminal: Array  # (T,) bool: the game ended here, so nothing is bootstrapped
    length: Array  # () int32


def empty(capacity: int, max_steps: int, observation_size: int, n_actions: int) -> Episode:
    rows, T = capacity + 1, max_steps
    return Episode(
        observations=jnp.zeros((rows, T + 1, observation_size)),
        available=jnp.zeros((rows, T + 1, n_actions), bool),
        actions=jnp.zeros((rows, T), jnp.int16),
        rewards=jnp.zeros((rows, T)),
        terminal=jnp.zeros((rows, T), bool),
        length=jnp.zeros((rows,), jnp.int32),
    )


def store(replay: Episode, slots: Array, episodes: Episode) -> Episode:
    """Write E episodes into the slots (E,)."""
    return jax.tree.map(lambda rows, new: rows.at[slots].set(new), replay, episodes)


def fetch(replay: Episode, indices: Array) -> Episode:
    """Minibatch of the episodes at `indices` (B,), episodes first; scratch reads as empty."""
    scratch = replay.length.shape[0] - 1
    batch: Episode = jax.tree.map(lambda rows: rows[indices], replay)
    return batch._replace(length=jnp.where(indices == scratch, 0, batch.length))


def shorten(batch: Episode, steps: int) -> Episode:
    """The first `steps` steps of a minibatch (B, T, ...) whose episodes are no longer than that."""
    return Episode(
        observations=batch.observations[:, : steps + 1],
        available=batch.available[:, : steps + 1],
        actions=batch.actions[:, :steps],
        rewards=batch.rewards[:, :steps],
        terminal=batch.terminal[:, :steps],
        length=batch.length,
    )


def slots_for(first: Array, count: int, capacity: int) -> Array:
    """The `count` slots that follow after `first` episodes have been stored."""
    return (first + jnp.arange(count)) % capacity
