"""How one agent chooses: ε-greedy among the actions open to it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

UNAVAILABLE = -1e9  # a value no available action can have


def greedy(q: Array, available: Array) -> Array:
    """The available action with the highest value; q and available are (..., A)."""
    return jnp.argmax(jnp.where(available, q, UNAVAILABLE), axis=-1).astype(jnp.int32)


def epsilon_greedy(chance: Array, q: Array, available: Array, epsilon: Array) -> Array:
    """With probability ε any available action, each equally likely; otherwise the greedy one.

    `chance` (..., 2) is uniform on [0, 1): whether to explore, and which action then.
    """
    rank = jnp.cumsum(available, axis=-1)  # 1 for the first available action, 2 for the second, …
    wanted = 1 + jnp.floor(chance[..., 1:] * rank[..., -1:])
    anything = jnp.argmax(rank >= wanted, axis=-1)
    explore = chance[..., 0] < epsilon
    return jnp.where(explore, anything, greedy(q, available)).astype(jnp.int32)


def exploration(env_steps: Array, start: float, end: float, over: int) -> Array:
    """ε after `env_steps`: from `start` down a line to `end`, then constant."""
    return jnp.maximum(end, start - (start - end) * env_steps / over)
