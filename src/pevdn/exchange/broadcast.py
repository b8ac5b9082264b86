"""PE-VDN A: every agent tells every other its message, in the clear."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pevdn.exchange import Opened


def broadcast(key: Array, messages: Array) -> Opened:
    """Each agent adds up all messages (N, ...). It hides data, not what a message says about it."""
    return Opened(jnp.broadcast_to(messages.sum(0), messages.shape), jnp.zeros(()))
