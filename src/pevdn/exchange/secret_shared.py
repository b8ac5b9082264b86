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

from pevdn.errors import UsageError
from pevdn.exchange import Opened
from pevdn.exchange.modular import FULL, negate, shares, total


class Code(NamedTuple):
    """How a real number becomes an element of Z_p."""

    precision: int = 5  # decimal places kept
    modulus: int = FULL  # p

    def most(self, n_agents: int) -> int:
        """The largest encoded |m_i|, a whole number, for which n of them cannot wrap around.

        A lone agent gets the room of two, so that 32 bits hold what is checked against it.
        """
        return (self.modulus - 1) // 2 // max(2, n_agents)

    def limit(self, n_agents: int) -> float:
        """The same as a real number: a larger |m_i| is rounded to more than `most`."""
        return (self.most(n_agents) + 0.5) / 10**self.precision

    def checked(self, n_agents: int) -> Code:
        """The same, or one sentence if it carries no message but 0."""
        if self.most(n_agents) == 0:
            raise UsageError(
                f"modulus is {self.modulus}, but the sum of {n_agents} agents' messages needs at "
                f"least {2 * max(2, n_agents) + 1}; raise it."
            )
        return self

    def refusal(self, n_agents: int, what: str = "a message") -> str:
        """Say that a message does not fit, and what to do about it."""
        return (
            f"{what} does not fit into ±{self.limit(n_agents):g}, the range that precision="
            f"{self.precision} and modulus={self.modulus} leave to {n_agents} agents, and the "
            "update was not made; lower precision or learning_rate, or raise modulus."
        )


def whole_units(x: Array, code: Code) -> Array:
    """The integer nearest to 10^PRECISION · x, as int32. |10^PRECISION · x| must be below 2³¹.

    Whole and fractional part are scaled apart, so that large values keep all their decimals
    (one float32 product would round a value of 5,000 to the nearest 0.0005).
    """
    whole = jnp.trunc(x)
    scale = 10**code.precision
    return whole.astype(jnp.int32) * scale + jnp.rint((x - whole) * scale).astype(jnp.int32)


def fits(messages: Array, code: Code, n_agents: int) -> Array:
    """Where the sum of n messages of this size cannot wrap around; (...) bool, false for NaN."""
    inside = jnp.abs(messages) < code.limit(n_agents) + 1  # NaN is not
    units = whole_units(jnp.where(inside, messages, 0.0), code)
    return inside & (jnp.abs(units) <= code.most(n_agents))


def saturate(messages: Array, code: Code, n_agents: int) -> Array:
    """The messages with NaN as 0 and all that is too large as the largest that fits.

    With differential privacy a message must not stop training: that it was too large would become
    known, without noise.
    """
    largest = code.most(n_agents) / 10**code.precision
    # One float32 below, so that the bound itself is not rounded up.
    bound = jnp.nextafter(jnp.float32(largest), jnp.float32(0))
    return jnp.clip(jnp.where(jnp.isnan(messages), 0.0, messages), -bound, bound)


def encode(x: Array, code: Code) -> Array:
    """eq. (10): the integer nearest to 10^PRECISION · x, modulo p. x must be in range."""
    units = whole_units(x, code)
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
    """Split a secret (...) into n shares (n, ...) with JAX's generator."""
    shape = (n - 1, *secret.shape)
    if modulus == FULL:
        uniform = jax.random.bits(key, shape, jnp.uint32)
    else:
        uniform = jax.random.randint(key, shape, 0, jnp.uint32(modulus), jnp.uint32)
    found: Array = shares(secret, uniform, modulus)
    return found


def refused(messages: Array, code: Code) -> Array:
    """The largest |m_i| of messages (N, ...) that does not fit, infinity for NaN, 0 if all do."""
    size = jnp.nan_to_num(jnp.abs(messages), nan=jnp.inf, posinf=jnp.inf)
    return jnp.max(jnp.where(fits(messages, code, messages.shape[0]), 0.0, size))


def secret_shared(key: Array, messages: Array, code: Code, saturating: bool = False) -> Opened:
    """Σ m_i for messages (N, ...). One that does not fit is never wrapped.

    It is reported, and then the total means nothing and the caller must not use it; or, if
    `saturating`, it counts as the largest that fits, and nothing is reported.
    """
    n = messages.shape[0]
    if saturating:
        messages = saturate(messages, code, n)
    encoded = encode(messages, code)
    keys = jax.random.split(key, n)
    # (sender, receiver, ...): agent i splits its own message and hands share j to agent j.
    held = jax.vmap(lambda k, s: split(k, s, n, code.modulus))(keys, encoded)
    # Each receiver j adds up the shares it holds, and broadcasts that partial sum.
    partial_sums = total(held, code.modulus)
    opened = decode(total(partial_sums, code.modulus), code)
    worst = jnp.zeros(()) if saturating else refused(messages, code)
    return Opened(jnp.broadcast_to(opened, messages.shape), worst)
