"""PE-VDN C: DP-SGD on whole episodes. Algorithm 1, from CLIP to ADD noise.

What it promises: for one agent and one update, the released gradient is a Poisson-subsampled
Gaussian mechanism on that agent's episodes. Neighbours differ in one episode, which is empty in one
of them for the whole team; clipping bounds what that changes in the sum by C. Noise of standard
deviation noise_multiplier · C is added once. The divisor is the *expected* batch size, a constant,
because the realised one would tell how many episodes were sampled. How updates compose is
`pevdn.privacy.accounting`'s business, and whom it protects from is in docs/privacy.md.

Floating-point numbers are not real numbers, so nothing that the promise rests on is left to them.
A clipped gradient is truncated to whole `unit`s, sums are sums of integers, and the noise is an
integer (`pevdn.privacy.gaussian`): the sensitivity of the sum is at most C/unit exactly, whatever
the order of summation, and the noise has the tails and the low bits of a Gaussian to within an
error that the accountant counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from pevdn.privacy import gaussian

Parameters = TypeVar("Parameters")  # of any network
ROOM = 2**30  # sums stay below it; 32 bits hold twice as much


@dataclass(frozen=True)
class Release:
    """How one agent's gradients of a minibatch become what it learns from."""

    clip_norm: float  # C
    noise_multiplier: float  # σ
    expected_batch_size: int
    by_array: bool = False  # clip each of the n arrays to C/√n instead of the whole to C

    @property
    def largest(self) -> int:
        """More episodes than a minibatch has but once in many runs: these must fit into ROOM."""
        return 2 * self.expected_batch_size + 64

    @property
    def spread(self) -> int:
        """The noise's multiplier k: the largest, hence the finest unit, for which sums fit."""
        weight = self.largest / self.noise_multiplier + 16  # in deviations of the noise
        fitting = (k for k in gaussian.SPREADS if weight * gaussian.deviation(k) < ROOM)
        return next(fitting, gaussian.SPREADS[-1])

    @property
    def unit(self) -> float:
        """What one whole number stands for."""
        if self.noise_multiplier == 0:
            return self.clip_norm * self.largest / ROOM
        return self.noise_multiplier * self.clip_norm / gaussian.deviation(self.spread)

    def clipped_sum(self, gradients: Parameters, padding: Array) -> Parameters:
        """Σ over episodes of one agent's gradients (B, ...), clipped, in whole units (int32).

        With `by_array` none of the arrays takes the others' share; the whole then still is within
        C. `padding` (B,) marks entries that are not episodes. L2 sensitivity to emptying one
        episode: at most C/unit, also when a gradient is not finite (such numbers count as zero).
        """
        from jax_privacy.clipping import clip_pytree  # a second, which only private training needs

        leaves, form = jax.tree.flatten(gradients)
        size = sum(leaf[0].size for leaf in leaves)
        norm = self.clip_norm * (1.0 - rounding(size))

        def clipped(one: list[Array], empty: Array) -> list[Array]:
            if self.by_array:
                share = norm / len(one) ** 0.5
                found = [clip_pytree(x, share, return_zero=empty)[0] for x in one]
            else:
                found = clip_pytree(one, norm, return_zero=empty)[0]
            # Truncation towards zero makes no coordinate larger, and so no norm.
            return [jnp.trunc(x * np.float32(1.0 / self.unit)).astype(jnp.int32) for x in found]

        total: Parameters = jax.tree.unflatten(
            form, [x.sum(0) for x in jax.vmap(clipped)(leaves, padding)]
        )
        return total

    def noise(self, words: Array) -> Array:
        """What the agent adds to its sum, in whole units: (P,) from uniform words (P, 4, 4)."""
        drawn: Array = gaussian.discrete_gaussian(words, self.spread)
        return drawn

    def mean(self, total: Parameters, draw: Callable[[int], Array]) -> Parameters:
        """(Σ + noise) / expected batch size, from a sum in whole units.

        `draw(P)` gives uniform words (P, 4, 4). A sum that leaves 32 bits wraps around, which
        is post-processing.
        """
        vector, as_parameters = ravel_pytree(total)
        if self.noise_multiplier > 0:
            vector = vector + self.noise(draw(vector.size))
        scale = np.float32(self.unit / self.expected_batch_size)
        found: Parameters = jax.tree.map(lambda x: x * scale, as_parameters(vector))
        return found

    def as_floats(self, total: Parameters) -> Parameters:
        """A sum in whole units, as the gradient that it stands for."""
        found: Parameters = jax.tree.map(lambda x: x * np.float32(self.unit), total)
        return found


def rounding(size: int) -> float:
    """By how much more than C, relatively, float32 may let a gradient of `size` numbers pass.

    The norm is a sum of `size` squares, off by at most size · 2⁻²⁵ in whatever order it is formed;
    scaling and quotient round a few times more. Twice that is taken off the clip norm.
    """
    return 2.0**-12 + size * 2.0**-24


def words(key: Array, size: int) -> Array:
    """Uniform words (size, 4, 4) for the noise of one agent in one update."""
    return jax.random.bits(key, (size, *gaussian.WORDS), jnp.uint32)
