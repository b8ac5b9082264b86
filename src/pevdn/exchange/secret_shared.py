"""PE-VDN B: the sum of the messages by additive secret sharing modulo p.

Algorithm 1, line by line: `encode` (eq. 10), `split` into n shares, distribute, sum the shares that
each agent holds, broadcast, sum again, `decode` (eq. 11).

Guarantee: any n − 1 of an agent's n shares are uniform on Z_p and independent of its message, so
n − 1 colluding agents learn about the remaining message only what the opened sum reveals (assuming
honest-but-curious agents and private channels). With two agents the sum reveals the other's
message. The simulation draws shares from JAX's generator (for p other than 2³² within 2⁻³² of
uniform); parties draw them from the operating system's (`network/streams.py`).

All arithmetic is in uint32, with any modulus p up to 2³².
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
    """The encoding of a real number as an element of Z_p."""

    precision: int = 5  # decimal places kept
    modulus: int = FULL  # p

    def most(self, n_agents: int) -> int:
        """Return the largest encoded |m_i| for which a sum of n cannot wrap around.

        A single agent gets the range of two, so that the check itself fits into 32 bits.
        """
        return (self.modulus - 1) // 2 // max(2, n_agents)

    def limit(self, n_agents: int) -> float:
        """Return `most` as a real number: a larger |m_i| rounds to more than `most`."""
        return (self.most(n_agents) + 0.5) / 10**self.precision

    def checked(self, n_agents: int) -> Code:
        """Return this encoding; raise if it can only encode 0."""
        if self.most(n_agents) == 0:
            raise UsageError(
                f"modulus is {self.modulus}, but the sum of {n_agents} agents' messages needs at "
                f"least {2 * max(2, n_agents) + 1}; raise it."
            )
        return self

    def misfit(self, n_agents: int, what: str) -> str:
        """Say that `what`, a message, does not fit, and into which range."""
        return (
            f"{what} does not fit into ±{self.limit(n_agents):g}, the range that precision="
            f"{self.precision} and modulus={self.modulus} leave to {n_agents} agents"
        )

    def refusal(self, n_agents: int, what: str) -> str:
        """Return the error text of a training whose message does not fit."""
        return (
            f"{self.misfit(n_agents, what)}, and the update was not made; lower precision or "
            "learning_rate, or raise modulus."
        )


def whole_units(x: Array, code: Code) -> Array:
    """Round 10^PRECISION · x, which must be below 2³¹ in size, to an int32.

    Integer and fractional parts are scaled separately, so that large values keep all decimals
    (a single float32 product would round 5,000 to the nearest 0.0005).
    """
    whole = jnp.trunc(x)
    scale = 10**code.precision
    return whole.astype(jnp.int32) * scale + jnp.rint((x - whole) * scale).astype(jnp.int32)


def fits(messages: Array, code: Code, n_agents: int) -> Array:
    """Return where a sum of n messages of this size cannot wrap around (...); false for NaN."""
    inside = jnp.abs(messages) < code.limit(n_agents) + 1  # NaN is not
    units = whole_units(jnp.where(inside, messages, 0.0), code)
    return inside & (jnp.abs(units) <= code.most(n_agents))


def saturate(messages: Array, code: Code, n_agents: int) -> Array:
    """Clamp messages to the range that fits, and replace NaN by 0.

    With differential privacy a message must not stop training: the stop would reveal, without
    noise, that it was too large.
    """
    largest = code.most(n_agents) / 10**code.precision
    # One float32 below, so that the bound itself is not rounded up.
    bound = jnp.nextafter(jnp.float32(largest), jnp.float32(0))
    return jnp.clip(jnp.where(jnp.isnan(messages), 0.0, messages), -bound, bound)


def encode(x: Array, code: Code) -> Array:
    """eq. (10): round 10^PRECISION · x modulo p; x must be in range."""
    units = whole_units(x, code)
    magnitude = jnp.abs(units).astype(jnp.uint32)
    return jnp.where(units < 0, negate(magnitude, code.modulus), magnitude)


def decode(s: Array, code: Code) -> Array:
    """eq. (11): the real number encoded by s, negative above p/2."""
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


def sum_shares(key: Array, words: Array, modulus: int) -> Array:
    """Return the sum (...) of all agents' words (N, ...) modulo p, formed from shares alone."""
    n = words.shape[0]
    keys = jax.random.split(key, n)
    # (sender, receiver, ...): agent i splits its own words and hands share j to agent j.
    held = jax.vmap(lambda k, s: split(k, s, n, modulus))(keys, words)
    # Each receiver j adds up the shares it holds, and broadcasts that partial sum.
    found: Array = total(total(held, modulus), modulus)
    return found


def refused(messages: Array, code: Code) -> Array:
    """Return the largest |m_i| of messages (N, ...) that does not fit; infinity for NaN, else 0."""
    size = jnp.nan_to_num(jnp.abs(messages), nan=jnp.inf, posinf=jnp.inf)
    return jnp.max(jnp.where(fits(messages, code, messages.shape[0]), 0.0, size))


def secret_shared(key: Array, messages: Array, code: Code, saturating: bool = False) -> Opened:
    """Return Σ m_i for messages (N, ...). A message that does not fit is never wrapped.

    It is reported as refused, and the caller must discard the total; if `saturating`, it is clamped
    instead, and none is refused.
    """
    n = messages.shape[0]
    if saturating:
        messages = saturate(messages, code, n)
    opened = decode(sum_shares(key, encode(messages, code), code.modulus), code)
    worst = jnp.zeros(()) if saturating else refused(messages, code)
    return Opened(jnp.broadcast_to(opened, messages.shape), worst)
