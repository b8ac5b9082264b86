"""Turn one agent's gradients into the one it learns from: sample, clip, sum, add noise, divide.

Two releases have the same interface; both runtimes release gradients only through them:

- `Average`, without differential privacy: a uniform sample, a plain mean.
- `SubsampledGaussian`, DP-SGD on whole episodes (PE-VDN C; Algorithm 1, from CLIP to ADD noise).

Guarantee of `SubsampledGaussian`: for one agent and one update, the released gradient is a
Poisson-subsampled Gaussian mechanism on that agent's episodes. Neighbours differ in one episode,
which is empty in one of them for the whole team; clipping bounds what that changes in the sum by C.
Noise of standard deviation noise_multiplier · C is added once. The divisor is the *expected* batch
size, a constant, because the realised one would reveal how many episodes were sampled. The object
that samples, clips and adds noise also states what the accountant counts (`accounted`), so that
what is accounted for is what ran. `pevdn.privacy.accounting` composes updates; docs/privacy.md
says against whom the result protects.

Floating-point numbers are not real numbers, so the guarantee does not rest on them. A clipped
gradient is truncated to whole `unit`s, sums are sums of integers, and the noise is an integer
(`pevdn.privacy.gaussian`): the sensitivity of the sum is at most C/unit exactly, whatever the order
of summation, and the noise has the tails and the low bits of a Gaussian to within an error that the
accountant counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from pevdn.config.experiment import Config, sampling_rate
from pevdn.config.settings import Settings, is_zero
from pevdn.errors import UsageError
from pevdn.exchange import modular, sampling
from pevdn.privacy import accounting, gaussian
from pevdn.privacy.accounting import Mechanism

Parameters = TypeVar("Parameters")  # of any network
Draw = Callable[[int], Array]  # uniform words (P, 4, 4) for the noise of P parameters
ROOM = 2**30  # sums stay below it; 32 bits hold twice as much


class Release(Protocol):
    """Turns one agent's gradients over a minibatch into the gradient it learns from."""

    @property
    def by_episode(self) -> bool:
        """Whether `total` needs the gradient of each episode, not only their sum."""
        ...

    def sample(self, words: Array, filled: Array | int) -> Array:
        """Return the slots of a minibatch, from uniform words (capacity,)."""
        ...

    def zeros(self, params: Parameters) -> Parameters:
        """Return the sum over no episodes."""
        ...

    def total(self, gradients: Parameters, padding: Array) -> Parameters:
        """Return the sum over the episodes of a part; `padding` (B,) marks empty slots."""
        ...

    def mean(self, total: Parameters, draw: Draw) -> Parameters:
        """Return the gradient to learn from, given the sum over a minibatch."""
        ...


def release_for(config: Config) -> Release:
    """Return the release of a configuration."""
    s = config.settings
    return SubsampledGaussian.of(s) if config.private else Average(s.expected_batch_size)


@dataclass(frozen=True)
class Average:
    """A uniform sample and its plain mean: no differential privacy."""

    batch_size: int
    by_episode = False

    def sample(self, words: Array, filled: Array | int) -> Array:
        return sampling.uniform(words, filled, self.batch_size)

    def zeros(self, params: Parameters) -> Parameters:
        zeros: Parameters = jax.tree.map(jnp.zeros_like, params)
        return zeros

    def total(self, gradients: Parameters, padding: Array) -> Parameters:
        return gradients  # an empty slot has no steps, and so no gradient

    def mean(self, total: Parameters, draw: Draw) -> Parameters:
        mean: Parameters = jax.tree.map(lambda g: g / self.batch_size, total)
        return mean


@dataclass(frozen=True)
class SubsampledGaussian:
    """A Poisson sample, clipped by episode, with Gaussian noise on the sum.

    `clip_norm` and `noise_multiplier` may be traced numbers that differ by lane; `spread` may not.
    """

    clip_norm: float  # C
    noise_multiplier: float  # σ
    expected_batch_size: int
    sampling_rate: float  # q
    spread: int  # k: the multiplier of the integer noise
    by_episode = True

    @classmethod
    def of(cls, s: Settings, smallest_noise: float | None = None) -> SubsampledGaussian:
        """Return the release of these settings; lanes share the `spread` of the smallest noise."""
        batch, noise = s.expected_batch_size, s.noise_multiplier
        k = spread_for(noise if smallest_noise is None else smallest_noise, batch)
        return cls(s.clip_norm, noise, batch, sampling_rate(batch, s.buffer_size), k)

    def accounted(self, n_agents: int, delta: float, relation: str) -> Mechanism:
        """Return what the accountant counts for one update of a team."""
        return Mechanism(self.sampling_rate, self.noise_multiplier, n_agents, delta, relation)

    @property
    def unit(self) -> Any:
        """The value of one unit of the integer sums."""
        silent = self.clip_norm * largest(self.expected_batch_size) / ROOM
        if is_zero(self.noise_multiplier):
            return silent
        noisy = self.noise_multiplier * self.clip_norm / gaussian.deviation(self.spread)
        if isinstance(self.noise_multiplier, int | float):
            return noisy
        return jnp.where(self.noise_multiplier > 0, noisy, silent)

    def sample(self, words: Array, filled: Array | int) -> Array:
        """CHOOSE: each stored episode with probability q, independently."""
        return sampling.poisson(words, filled, self.sampling_rate)

    def zeros(self, params: Parameters) -> Parameters:
        zeros: Parameters = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.int32), params)
        return zeros

    def total(self, gradients: Parameters, padding: Array) -> Parameters:
        """CLIP: the sum of one agent's gradients (B, ...), each clipped, in whole units (int32).

        L2 sensitivity to emptying one episode: at most C/unit, also when a gradient is not finite
        (such numbers count as zero).
        """
        from jax_privacy.clipping import clip_pytree  # a second, which only private training needs

        leaves, form = jax.tree.flatten(gradients)
        norm = self.clip_norm * (1.0 - rounding(sum(leaf[0].size for leaf in leaves)))
        scale = jnp.asarray(1.0 / self.unit, jnp.float32)

        def clipped(one: list[Array], empty: Array) -> list[Array]:
            found = clip_pytree(one, norm, return_zero=empty)[0]
            # Truncation towards zero makes no coordinate larger, and so no norm.
            return [jnp.trunc(x * scale).astype(jnp.int32) for x in found]

        total: Parameters = jax.tree.unflatten(
            form, [x.sum(0) for x in jax.vmap(clipped)(leaves, padding)]
        )
        return total

    def noise(self, words: Array) -> Array:
        """Return the noise of a sum, in whole units: (P,) from uniform words (P, 4, 4)."""
        drawn: Array = gaussian.discrete_gaussian(words, self.spread)
        if isinstance(self.noise_multiplier, int | float):
            return drawn
        return jnp.where(self.noise_multiplier > 0, drawn, 0)

    def mean(self, total: Parameters, draw: Draw) -> Parameters:
        """ADD noise: (Σ + noise) / expected batch size, from a sum in whole units.

        A sum that leaves 32 bits wraps around, which is post-processing.
        """
        vector, as_parameters = ravel_pytree(total)
        if not is_zero(self.noise_multiplier):
            vector = vector + self.noise(draw(vector.size))
        scale = jnp.asarray(self.unit / self.expected_batch_size, jnp.float32)
        found: Parameters = jax.tree.map(lambda x: x * scale, as_parameters(vector))
        return found

    def as_floats(self, total: Parameters) -> Parameters:
        """Convert a sum in whole units to floating point."""
        found: Parameters = jax.tree.map(lambda x: x * np.float32(self.unit), total)
        return found


@dataclass(frozen=True)
class NoisedOpening:
    """One agent's side of an opening whose sum is noised: clip, add a share of the noise, subtract.

    Guarantee: the opened sum is a Gaussian mechanism on one agent's record, of sensitivity M and
    standard deviation M · opening_noise, also to an observer who knows all messages and all noise
    of t = `colluders` other agents. Each agent adds noise of variance (M · opening_noise)²/(N − t),
    so the N − t agents outside a coalition together add enough. As in `SubsampledGaussian`, the
    clipped messages and the noise are integers; the sum is taken modulo p, which is post-processing
    and practically never wraps around.

    `message_norm` and `opening_noise` may be traced numbers that differ by lane; `spread` may not.
    """

    message_norm: float  # M
    opening_noise: float  # s/M
    n_agents: int  # N
    colluders: int  # t
    openings: int  # n: of each record
    modulus: int  # p
    spread: int  # k: the multiplier of the integer noise

    @classmethod
    def of(cls, s: Settings, n_agents: int, smallest_noise: float | None = None) -> NoisedOpening:
        """Return the opening of these settings; lanes share the `spread` of the smallest noise."""
        t = colluders(s, n_agents)
        least = s.opening_noise if smallest_noise is None else smallest_noise
        if least and not _fits(least, n_agents, t, s.modulus, gaussian.SPREADS[-1]):
            raise UsageError(
                f"modulus is {s.modulus}, but the noised sum of {n_agents} agents' messages at "
                f"opening_noise={least:g} needs a larger one; raise it."
            )
        fitting = (k for k in gaussian.SPREADS if least and _fits(least, n_agents, t, s.modulus, k))
        spread = next(fitting, gaussian.SPREADS[-1])
        return cls(s.message_norm, s.opening_noise, n_agents, t, s.openings, s.modulus, spread)

    def accounted(self, update: Mechanism) -> Mechanism:
        """Return what the accountant counts for updates, with the openings of a record added."""
        t, noise = self.colluders, self.opening_noise
        return update._replace(openings=self.openings, opening_noise=noise, colluders=t)

    @property
    def removes_own_noise(self) -> bool:
        """Whether an agent subtracts its own noise from the opened sum before it learns.

        Only if it alone hides its record: otherwise its noise also hides the records of other
        agents, and its parameters would reveal it.
        """
        return self.n_agents - self.colluders <= 1

    @property
    def unit(self) -> Any:
        """The value of one unit of the integer messages."""
        silent = self.message_norm * (4 * max(2, self.n_agents) / self.modulus)
        if is_zero(self.opening_noise):
            return silent
        own = self.opening_noise * self.message_norm / math.sqrt(self.n_agents - self.colluders)
        noisy = own / gaussian.deviation(self.spread)
        if isinstance(self.opening_noise, int | float):
            return noisy
        return jnp.where(self.opening_noise > 0, noisy, silent)

    def clip(self, messages: Array) -> Array:
        """CLIP the messages (T,) of one record to norm M, in whole units (int32).

        L2 sensitivity to emptying the record: at most M/unit, also when a message is not finite
        (such numbers count as zero).
        """
        finite = jnp.clip(jnp.where(jnp.isfinite(messages), messages, 0.0), -1e30, 1e30)
        # Scaled to at most 1 first, so that no square overflows. XLA may divide by multiplying with
        # a reciprocal: that of a number between 1e-30 and 1e30 is not flushed to 0.
        largest = jnp.maximum(jnp.max(jnp.abs(finite)), 1e-30)
        scaled = finite / largest
        bound = self.message_norm * (1.0 - rounding(messages.size))
        clipped = scaled * jnp.minimum(largest, bound / jnp.sqrt(jnp.sum(scaled**2)))
        # Truncation towards zero makes no coordinate larger, and so no norm.
        return jnp.trunc(clipped * jnp.asarray(1.0 / self.unit, jnp.float32)).astype(jnp.int32)

    def noise(self, words: Array) -> Array:
        """Return this agent's noise, in whole units: (...) from uniform words (..., 4, 4)."""
        drawn: Array = gaussian.discrete_gaussian(words, self.spread)
        if isinstance(self.opening_noise, int | float):
            return drawn if self.opening_noise else jnp.zeros_like(drawn)
        return jnp.where(self.opening_noise > 0, drawn, 0)

    def encode(self, units: Array) -> Array:
        """Return signed units as elements of Z_p."""
        size = jnp.abs(units).astype(jnp.uint32)
        return jnp.where(units < 0, modular.negate(size, self.modulus), size)

    def others(self, total: Array, own: Array) -> Array:
        """Return the opened sum (elements of Z_p) less the agent's own units, as a real number."""
        rest = modular.add(total, modular.negate(self.encode(own), self.modulus), self.modulus)
        negative = rest > jnp.uint32(self.modulus // 2)
        size = jnp.where(negative, modular.negate(rest, self.modulus), rest).astype(jnp.float32)
        return jnp.where(negative, -size, size) * jnp.asarray(self.unit, jnp.float32)


def colluders(s: Settings, n_agents: int) -> int:
    """Return t, the largest number of teammates that may pool what they see."""
    return accounting.coalition_size(s.colluders, n_agents)


def _fits(noise: float, n_agents: int, t: int, modulus: int, spread: int) -> bool:
    """Whether a noised sum, up to 18 standard deviations of its noise, stays within ±p/2."""
    messages = n_agents * math.sqrt(n_agents - t) / noise
    return (messages + 18 * math.sqrt(n_agents)) * gaussian.deviation(spread) < (modulus - 1) // 2


def largest(expected_batch_size: int) -> int:
    """Return a minibatch size that is rarely exceeded in many runs; its sums fit into ROOM."""
    return 2 * expected_batch_size + 64


def spread_for(noise_multiplier: float, expected_batch_size: int) -> int:
    """Return the largest multiplier k of the noise, hence the finest unit, for which sums fit."""
    if noise_multiplier == 0:
        return gaussian.SPREADS[-1]
    weight = largest(expected_batch_size) / noise_multiplier + 16  # in deviations of the noise
    fitting = (k for k in gaussian.SPREADS if weight * gaussian.deviation(k) < ROOM)
    return next(fitting, gaussian.SPREADS[-1])


def rounding(size: int) -> float:
    """Return the relative amount by which a gradient clipped in float32 may exceed C.

    The norm is a sum of `size` squares, off by at most size · 2⁻²⁵ in whatever order it is formed;
    scaling and quotient round a few times more. Twice that is taken off the clip norm.
    """
    return 2.0**-12 + size * 2.0**-24


def words(key: Array, *shape: int) -> Array:
    """Draw uniform words (*shape, 4, 4) for one agent's noise in one update or opening."""
    return jax.random.bits(key, (*shape, *gaussian.WORDS), jnp.uint32)
