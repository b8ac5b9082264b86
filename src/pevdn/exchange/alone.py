"""Independent Q-learning: nobody tells anybody anything."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pevdn.exchange import Opened


def alone(key: Array, messages: Array) -> Opened:
    """Each agent keeps its own message (N, ...) and takes the team's reward for its own."""
    return Opened(messages, jnp.zeros(()))
