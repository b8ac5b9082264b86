"""Which episodes the team learns from: one draw, the same for every agent.

The indices are public within the team. Slots run from 0 to capacity − 1, of which the first
`filled` hold an episode; `capacity` itself is the scratch slot that padding points at.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def uniform(key: Array, filled: Array, capacity: int, batch_size: int) -> Array:
    """`batch_size` different slots, each set of them equally likely; (batch_size,)."""
    tickets = jnp.where(jnp.arange(capacity) < filled, jax.random.uniform(key, (capacity,)), -1.0)
    return jax.lax.top_k(tickets, batch_size)[1]


def poisson(key: Array, filled: Array, capacity: int, rate: float) -> Array:
    """Each filled slot independently with probability q = `rate`; (capacity,) bool."""
    return (jax.random.uniform(key, (capacity,)) < rate) & (jnp.arange(capacity) < filled)


def padded(sampled: Array, size: int, part: Array) -> Array:
    """Part number `part` of a sample (capacity,) bool, as `size` slots filled up with scratch.

    A sample of any size is the union of its parts, so that a compiled program of fixed shapes
    sees every sampled episode exactly once: nothing is dropped, and the sampling stays Poisson.
    """
    rank = jnp.cumsum(sampled) - 1
    here = sampled & (rank >= part * size) & (rank < (part + 1) * size)
    return jnp.nonzero(here, size=size, fill_value=sampled.shape[0])[0]
