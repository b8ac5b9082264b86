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


def fetch(replay: Episode, indices: Array, steps: int) -> Episode:
    """Minibatch (T, B, ...) of the first `steps` steps of the episodes at `indices` (B,).

    Time comes first, as it is learnt from. Scratch reads as an empty episode.
    """
    scratch = replay.length.shape[0] - 1

    def first(rows: Array, steps: int) -> Array:
        where = (indices[None, :], jnp.arange(steps)[:, None])  # so that nothing is turned later
        return rows.at[where].get(mode="promise_in_bounds")

    return Episode(
        observations=first(replay.observations, steps + 1),
        available=first(replay.available, steps + 1),
        actions=first(replay.actions, steps),
        rewards=first(replay.rewards, steps),
        terminal=first(replay.terminal, steps),
        length=jnp.where(indices == scratch, 0, replay.length[indices]),
    )


def shorten(episodes: Episode, steps: int) -> Episode:
    """The first `steps` steps of episodes (B, T, ...) that are no longer than that."""
    return Episode(
        observations=episodes.observations[:, : steps + 1],
        available=episodes.available[:, : steps + 1],
        actions=episodes.actions[:, :steps],
        rewards=episodes.rewards[:, :steps],
        terminal=episodes.terminal[:, :steps],
        length=episodes.length,
    )


def time_first(episodes: Episode) -> Episode:
    """(B, T, ...) as stored to (T, B, ...) as learnt from."""
    turned: Episode = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, episodes)
    return turned


def slots_for(first: Array, count: int, capacity: int) -> Array:
    """The `count` slots that follow after `first` episodes have been stored."""
    return (first + jnp.arange(count)) % capacity
