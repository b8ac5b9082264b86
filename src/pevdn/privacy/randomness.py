"""Derive the random keys of a training from a public seed or from a secret.

Everything training draws (noise, minibatches, shares, exploration, initial parameters) derives from
one key per lane. With `seed` that key is the seed: anyone can repeat the training, including an
attacker who wants to subtract its noise. With `os` it derives, through ChaCha20, from 32 bytes of
the operating system in the run's file `secret`. Evaluations derive from the seed in either case:
they are not protected.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array

    from pevdn.config.experiment import Config

MEANING = {
    "seed": (
        "All noise and all samples of this training derive from a seed of at most 31 bits. Anyone "
        "can try all seeds, recompute the noise and subtract it. Simulated episodes, which are "
        "no one's data, lose nothing by that. For real episodes the guarantee is void: train with "
        "randomness=os."
    ),
    "os": (
        "All noise and all samples of this training derive from 32 bytes of the operating system's "
        "generator, kept in the file `secret` of the run. The guarantee holds against anyone who "
        "has neither these bytes nor the checkpoints."
    ),
}


def source(config: Config) -> str:
    """Return where the run's random numbers come from: `os` or `seed`."""
    return "os" if config.settings.randomness == "os" else "seed"


def generator(config: Config) -> Any:
    """Return the JAX generator of the run's keys; None selects JAX's default."""
    if source(config) == "seed":
        return None
    from pevdn.privacy import chacha

    return chacha.generator()


def origins(config: Config, secret: bytes | None, nonce: str = "") -> Array:
    """Return the initial key of each lane, (S,).

    `nonce` is that of the run's ledger: a training started again in a copy of the directory has a
    different one.
    """
    import jax
    import jax.numpy as jnp

    seeds = jnp.arange(config.seed, config.seed + config.seeds)
    if secret is None:
        return jax.vmap(jax.random.key)(seeds)
    from pevdn.privacy import chacha

    root = chacha.key(hashlib.sha256(b"pevdn training" + secret + nonce.encode()).digest())
    return jax.vmap(lambda seed: jax.random.fold_in(root, seed))(seeds)


def like_origins(config: Config) -> Any:
    """Return the shape and type of `origins` without computing them."""
    import jax

    return jax.eval_shape(lambda: origins(config, bytes(32) if generator(config) else None))
