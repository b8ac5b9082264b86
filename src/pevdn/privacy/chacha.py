"""Provide ChaCha20 as a JAX generator with 256-bit keys for everything that training draws.

JAX's own keys have 64 bits, and a run's seed at most 31: an attacker who tries them all can
recompute the noise and subtract it. A key of this generator comes from the operating system.
Splitting a key, folding a number into it and drawing bits use different nonces, so no two of them
give the same block (JAX's own `fold_in(key, n)` equals `split(key, 3)[n]`).

Guarantee: to an observer without the key, all numbers drawn from it, and from keys derived from it,
are indistinguishable from uniform and independent ones if ChaCha20 (RFC 8439) is a pseudorandom
function.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

KEY_WORDS = 8
BLOCK_WORDS = 16
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
_BITS, _SPLIT, _FOLD = 1, 2, 3  # nonces


def block(key: Array, counter: Array, nonce: tuple[Array | int, ...]) -> Array:
    """Return ChaCha20 blocks (n, 16) of a key (8,) for counters (n,) and a three-word nonce."""
    n = counter.shape[0]

    def row(*words: Any) -> Array:
        return jnp.stack([jnp.broadcast_to(jnp.asarray(w, jnp.uint32), (n,)) for w in words])

    start = (row(*_CONSTANTS), row(*key[:4]), row(*key[4:]), row(counter, *nonce))  # (4, n) each

    def rotate(x: Array, bits: int) -> Array:
        return (x << bits) | (x >> (32 - bits))

    def quarters(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array, Array, Array]:
        """Run four quarter rounds side by side."""
        for left, right in ((16, 12), (8, 7)):
            a = a + b
            d = rotate(d ^ a, left)
            c = c + d
            b = rotate(b ^ c, right)
        return a, b, c, d

    def double_round(_: Any, rows: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b, c, d = quarters(*rows)  # columns, then diagonals
        shifted = (a, jnp.roll(b, -1, 0), jnp.roll(c, -2, 0), jnp.roll(d, -3, 0))
        a, b, c, d = quarters(*shifted)
        return a, jnp.roll(b, 1, 0), jnp.roll(c, 2, 0), jnp.roll(d, 3, 0)

    # A loop compiles faster on a CPU; on an accelerator each iteration would be its own kernel.
    unroll = 1 if jax.default_backend() == "cpu" else 10
    end = jax.lax.fori_loop(0, 10, double_round, start, unroll=unroll)
    mixed = [x + y for x, y in zip(start, end, strict=True)]
    return jnp.concatenate(mixed).T


def _bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    size = math.prod(shape)
    words = size * 2 if bit_width == 64 else size
    counters = jnp.arange(-(-words // BLOCK_WORDS), dtype=jnp.uint32)
    drawn = block(key, counters, (_BITS, 0, 0)).reshape(-1)[:words]
    if bit_width == 64:
        high, low = drawn.reshape(2, size).astype(jnp.uint64)
        return ((high << 32) | low).reshape(shape)
    return drawn.astype(f"uint{bit_width}").reshape(shape)


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    counters = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    return block(key, counters, (_SPLIT, 0, 0))[:, :KEY_WORDS].reshape(*shape, KEY_WORDS)


def _fold_in(key: Array, number: Any) -> Array:
    counter = jnp.asarray(number, jnp.uint32)[None]
    return block(key, counter, (_FOLD, 0, 0))[0, :KEY_WORDS]


def _seed(number: Array) -> Array:
    raise TypeError("a ChaCha20 key needs 32 secret bytes, not a seed; use chacha.key.")


@cache
def generator() -> Any:
    """Return the implementation for `jax.random.wrap_key_data(words, impl=…)`."""
    from jax.extend.random import define_prng_impl

    return define_prng_impl(
        key_shape=(KEY_WORDS,),
        seed=_seed,
        split=_split,
        random_bits=_bits,
        fold_in=_fold_in,
        name="chacha20",
        tag="chacha",
    )


def key(secret: bytes) -> Array:
    """Return the key given by 32 secret bytes."""
    words = np.frombuffer(secret, "<u4")
    if words.shape != (KEY_WORDS,):
        raise ValueError(f"a key has 32 bytes, not {len(secret)}.")
    return jax.random.wrap_key_data(jnp.asarray(words), impl=generator())
