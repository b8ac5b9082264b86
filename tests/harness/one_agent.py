"""One small agent for the tests of agent/: its sizes and its episodes."""

import jax
import jax.numpy as jnp
import numpy as np

from pevdn.agent.replay import Episode

KEY = jax.random.key(0)
O, A, H, T = 5, 4, 8, 6


def episode(seed: int, *batch: int, length=None) -> Episode:
    """Return random episodes (T, *batch, ...), of random length unless `length` says how long."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, T + 1, batch) if length is None else np.broadcast_to(length, batch)
    available = rng.random((T + 1, *batch, A)) < 0.7
    available[..., 0] = True
    return Episode(
        observations=jnp.asarray(rng.normal(size=(T + 1, *batch, O)), jnp.float32),
        available=jnp.asarray(available),
        actions=jnp.asarray(rng.integers(0, A, (T, *batch)), jnp.int16),
        rewards=jnp.asarray(rng.normal(size=(T, *batch)), jnp.float32),
        terminal=jnp.asarray(np.arange(T).reshape(-1, *([1] * len(batch))) == length - 1),
        length=jnp.asarray(length, jnp.int32),
    )
