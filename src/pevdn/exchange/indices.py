"""Which episodes the team learns from: one draw, the same for every agent.

The indices are public within the team. Slots run from 0 to capacity − 1, of which the first
`filled` hold an episode; `capacity` itself is the scratch slot that padding points at.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array


def uniform(key: Array, filled: Array, capacity: int, batch_size: int) -> Array:
    """`batch_size` different slots, each set of them equally likely; (batch_size,)."""
    tickets = jnp.where(jnp.arange(capacity) < filled, jax.random.uniform(key, (capacity,)), -1.0)
    return jax.lax.top_k(tickets, batch_size)[1]


def poisson(key: Array, filled: Array, capacity: int, rate: float) -> Array:
    """Each filled slot independently with probability q = `rate`, the rest scratch; (capacity,).

    A sample of any size fits, so that nothing is dropped and the sampling stays Poisson. The
    probability is q rounded down to a multiple of 2⁻³², never above what is accounted for.
    """
    slots = jnp.arange(capacity)
    sampled = slots < filled
    if rate < 1:
        sampled &= jax.random.bits(key, (capacity,), jnp.uint32) < jnp.uint32(int(rate * 2**32))
    return jnp.where(sampled, slots, capacity)


def longest_first(slots: Array, lengths: Array) -> Array:
    """The slots in the order of their episodes' lengths (capacity + 1,), scratch at the end."""
    scratch = lengths.shape[0] - 1
    return slots[jnp.argsort(jnp.where(slots == scratch, 1, -lengths[slots]))]


def by_horizon(
    slots: Array, lengths: Array, horizons: Sequence[int], part: int
) -> tuple[Array, Array]:
    """Slots (S, B) in parts of episodes that all need the same horizon, and how many parts.

    `lengths` (S, capacity + 1) are those of the stored episodes. A part belongs to one horizon, the
    same in all lanes, and is filled up with scratch. What is computed of an episode then depends on
    its own length and not on which others were sampled.
    """
    (S, B), scratch, H = slots.shape, lengths.shape[1] - 1, len(horizons)
    own = jnp.searchsorted(jnp.asarray(horizons), jnp.take_along_axis(lengths, slots, axis=1))
    mine = (own[..., None] == jnp.arange(H)) & (slots != scratch)[..., None]  # (S, B, H)
    parts = jnp.max(-(-mine.sum(1) // part), axis=0)  # (H,)
    first = (jnp.cumsum(parts) - parts) * part
    place = jnp.sum(jnp.where(mine, first + jnp.cumsum(mine, axis=1) - 1, 0), axis=-1)
    size = H * -(-B // part) * part
    place = jnp.where(slots == scratch, size, place)
    lanes = jnp.arange(S)[:, None]
    laid = jnp.full((S, size), scratch, slots.dtype).at[lanes, place].set(slots, mode="drop")
    return laid, parts.sum()
