"""PE-VDN B: the sum of the messages by additive secret sharing modulo p.

Algorithm 1, line by line: `encode` (eq. 10), `split` into n shares, distribute, each agent sums
the shares it holds, broadcast, `reconstruct`, `decode` (eq. 11).

What it promises: n − 1 of an agent's n shares are uniform on Z_p and independent of its message,
so any n − 1 agents together learn of the n-th one's message only what the opened sum tells them
(assuming honest-but-curious agents and private channels). With two agents the sum gives the
other's message away. In this simulation the shares come from JAX's generator (for p other than
2³² within 2⁻³² of uniform); a deployment must draw them from the operating system's.

All arithmetic is in uint32: p may be any modulus up to 2³², which wraps around for free.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.exchange import Opened

FULL = 2**32


class Code(NamedTuple):
    """How a real number becomes an element of Z_p."""

    precision: int = 5  # decimal places kept
    modulus: int = FULL  # p

    def limit(self, n_agents: int) -> float:
        """The largest |m_i| for which the sum of n messages cannot wrap around."""
        return self.modulus / (2 * n_agents * 10**self.precision)


def add(a: Array, b: Array, modulus: int) -> Array:
    """(a + b) mod p for a, b < p ≤ 2³², without a wider integer."""
    total = a + b  # wraps modulo 2³²
    if modulus == FULL:
        return total
    p = jnp.uint32(modulus)
    return jnp.where((total < a) | (total >= p), total - p, total)


def negate(a: Array, modulus: int) -> Array:
    """−a mod p."""
    if modulus == FULL:
        return jnp.uint32(0) - a
    return jnp.where(a == 0, a, jnp.uint32(modulus) - a)


def encode(x: Array, code: Code) -> Array:
    """eq. (10): the integer nearest to 10^PRECISION · x, modulo p.

    Whole and fractional part are scaled apart, so that large values keep all their decimals
    (one float32 product would round a value of 5,000 to the nearest 0.0005). x must be in range.
    """
    whole = jnp.trunc(x)
    scale = 10**code.precision
    units = whole.astype(jnp.int32) * scale + jnp.rint((x - whole) * scale).astype(jnp.int32)
    magnitude = jnp.abs(units).astype(jnp.uint32)
    return jnp.where(units < 0, negate(magnitude, code.modulus), magnitude)


def decode(s: Array, code: Code) -> Array:
    """eq. (11): the real number that s stands for, negative above p/2."""
    negative = s > jnp.uint32(code.modulus // 2)
    magnitude = jnp.where(negative, negate(s, code.modulus), s)
    scale = jnp.uint32(10**code.precision)
    value = (magnitude // scale).astype(jnp.float32) + (magnitude % scale) / jnp.float32(scale)
    return jnp.where(negative, -value, value)


def split(key: Array, secret: Array, n: int, modulus: int) -> Array:
    """n shares (n, ...) of a secret (...): n − 1 uniform ones, and what is missing to it."""
    shape = (n - 1, *secret.shape)
    if modulus == FULL:
        uniform = jax.random.bits(key, shape, jnp.uint32)
    else:
        uniform = jax.random.randint(key, shape, 0, jnp.uint32(modulus), jnp.uint32)
    rest = secret
    for share in uniform:
        rest = add(rest, negate(share, modulus), modulus)
    return jnp.concatenate([uniform, rest[None]])


def reconstruct(shares: Array, modulus: int) -> Array:
    """The secret (...) behind n shares (n, ...)."""
    total = shares[0]
    for share in shares[1:]:
        total = add(total, share, modulus)
    return total


def refused(messages: Array, code: Code) -> Array:
    """The largest |m_i| outside ±p/(2·N·10^PRECISION), infinity for NaN, 0 if all are inside."""
    size = jnp.nan_to_num(jnp.abs(messages), nan=jnp.inf, posinf=jnp.inf)
    return jnp.max(jnp.where(size >= code.limit(messages.shape[0]), size, 0.0))


def secret_shared(key: Array, messages: Array, code: Code) -> Opened:
    """Σ m_i for messages (N, ...). A message that does not fit is reported, never wrapped.

    When something was refused the total means nothing, and the caller must not use it.
    """
    n = messages.shape[0]
    encoded = encode(messages, code)
    keys = jax.random.split(key, n)
    # (sender, receiver, ...): agent i splits its own message and hands share j to agent j.
    shares = jax.vmap(lambda k, s: split(k, s, n, code.modulus))(keys, encoded)
    # Each receiver j adds up the shares it holds, and broadcasts that partial sum.
    partial_sums = reconstruct(shares, code.modulus)
    total = decode(reconstruct(partial_sums, code.modulus), code)
    return Opened(jnp.broadcast_to(total, messages.shape), refused(messages, code))
