"""Independent Q-learning: no communication."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pevdn.exchange import Opened


def alone(key: Array, messages: Array) -> Opened:
    """Return each agent's own message (N, ...), which treats the team's reward as its own."""
    return Opened(messages, jnp.zeros(()))
