"""ε-greedy choice among one agent's available actions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

UNAVAILABLE = -1e9  # stands in for the value of an unavailable action


def greedy(q: Array, available: Array) -> Array:
    """Return the available action with the highest value; q and available are (..., A)."""
    return jnp.argmax(jnp.where(available, q, UNAVAILABLE), axis=-1).astype(jnp.int32)


def epsilon_greedy(chance: Array, q: Array, available: Array, epsilon: Array) -> Array:
    """Return a uniformly random available action with probability ε, else the greedy one.

    `chance` (..., 2) is uniform on [0, 1): it decides whether to explore, and which action to take.
    """
    rank = jnp.cumsum(available, axis=-1)  # 1 for the first available action, 2 for the second, …
    drawn = 1 + jnp.floor(chance[..., 1:] * rank[..., -1:])
    random_action = jnp.argmax(rank >= drawn, axis=-1)
    explore = chance[..., 0] < epsilon
    return jnp.where(explore, random_action, greedy(q, available)).astype(jnp.int32)


def exploration(env_steps: Array, start: float, end: float, over: int) -> Array:
    """Return ε after `env_steps`: linear from `start` to `end` over `over` steps, then constant."""
    return jnp.maximum(end, start - (start - end) * env_steps / over)
