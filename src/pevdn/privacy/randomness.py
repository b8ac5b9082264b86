"""Where a training's random numbers come from: a seed that anybody may know, or a secret.

All that training draws (noise, minibatches, shares, exploration, first parameters) follows from one
key for each lane. With `seed` that key is the seed: a training can be repeated, also by whoever
wants to take its noise off. With `os` it comes from 32 bytes of the operating system, in the file
`secret` of the run, through ChaCha20. Evaluations follow from the seed in either case: they are not
protected.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array

    from pevdn.config.experiment import Config

MEANING = {
    "seed": (
        "All noise and all samples of this training follow from a seed of at most 31 bits. Anybody "
        "can try every seed, compute the noise again and take it off. Episodes of a simulator "
        "belong to nobody and lose nothing by that. For episodes that belong to somebody the "
        "guarantee is void: train with randomness=os."
    ),
    "os": (
        "All noise and all samples of this training follow from 32 bytes of the operating system's "
        "generator, kept in the file `secret` of the run. The guarantee holds towards whoever has "
        "neither these bytes nor the checkpoints."
    ),
}


def source(config: Config) -> str:
    """`os`, or `seed`: what the random numbers of a run follow from."""
    return "os" if config.settings.randomness == "os" else "seed"


def generator(config: Config) -> Any:
    """JAX's name for the generator of the run's keys; None for JAX's own."""
    if source(config) == "seed":
        return None
    from pevdn.privacy import chacha

    return chacha.generator()


def origins(config: Config, secret: bytes | None, nonce: str = "") -> Array:
    """The key (S,) that each lane of a training begins with.

    The `nonce` is that of the run's ledger: a training that begins again in a copy of the directory
    has another one.
    """
    import jax
    import jax.numpy as jnp

    seeds = jnp.arange(config.seed, config.seed + config.seeds)
    if secret is None:
        return jax.vmap(jax.random.key)(seeds)
    from pevdn.privacy import chacha

    own = chacha.key(hashlib.sha256(b"pevdn training" + secret + nonce.encode()).digest())
    return jax.vmap(lambda seed: jax.random.fold_in(own, seed))(seeds)


def like_origins(config: Config) -> Any:
    """Their shape and type alone."""
    import jax

    return jax.eval_shape(lambda: origins(config, bytes(32) if generator(config) else None))
