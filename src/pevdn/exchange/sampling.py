"""Which episodes the team learns from: one draw, the same for every agent.

The slots are public within the team. They run from 0 to capacity − 1, of which the first `filled`
hold an episode; `capacity` itself is the scratch slot, which marks padding. Both functions turn
uniform 32-bit words (capacity,) into slots; where the words come from is the runtime's matter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def uniform(words: Array, filled: Array | int, batch_size: int) -> Array:
    """Return `batch_size` distinct slots, each set of them equally likely; (batch_size,)."""
    tickets = (words >> 9).astype(jnp.int32)
    tickets = jnp.where(jnp.arange(len(words)) < filled, tickets, -1)
    return jax.lax.top_k(tickets, batch_size)[1]


def poisson(words: Array, filled: Array | int, rate: float) -> Array:
    """Return each filled slot with probability q = `rate`, independently; scratch elsewhere.

    The result (capacity,) holds a sample of any size, so that nothing is dropped and the sampling
    stays Poisson. The probability is q rounded down to a multiple of 2⁻³², never above what is
    accounted for.
    """
    slots = jnp.arange(len(words))
    sampled = slots < filled
    if rate < 1:
        sampled &= words < jnp.uint32(int(rate * 2**32))
    return jnp.where(sampled, slots, len(words))
