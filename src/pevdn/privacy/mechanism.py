"""PE-VDN C: DP-SGD on whole episodes. Algorithm 1, from CLIP to ADD noise.

What it promises: for one agent and one update, the released gradient is a Poisson-subsampled
Gaussian mechanism on that agent's episodes. Neighbours differ in one episode, which is empty in one
of them for the whole team; clipping bounds what that changes in the sum by C. Noise of standard
deviation noise_multiplier · C is added once. The divisor is the *expected* batch size, a constant,
because the realised one would tell how many episodes were sampled. How updates compose is
`pevdn.privacy.accounting`'s business, and whom it protects from is in docs/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax import Array
from jax.flatten_util import ravel_pytree
from jax_privacy.clipping import clipped_fun
from jax_privacy.noise_addition import gaussian_privatizer


def padded_batch_size(expected_batch_size: int, buffer_size: int) -> int:
    """Room for one part of a Poisson sample: two standard deviations above its mean.

    A larger sample is worked off in several parts (`exchange.indices.padded`), so this number
    sets the speed and nothing else.
    """
    return min(buffer_size, math.ceil(expected_batch_size + 2 * math.sqrt(expected_batch_size)))


def clipped_sum(
    gradient: Callable[..., Any], batch: tuple[Any, ...], padding: Array, clip_norm: float
) -> Array:
    """Σ over episodes of the gradient clipped to C, for one agent, as one flat vector (P,).

    `gradient` takes one entry of each part of `batch`, whose arrays have the B episodes first;
    `padding` (B,) marks entries that are not episodes. L2 sensitivity to emptying one episode:
    `clip_norm`, also when a gradient is not finite (it then counts as zero).
    """
    per_episode = clipped_fun(
        lambda *episode: ravel_pytree(gradient(*episode))[0],
        batch_argnums=range(len(batch)),
        keep_batch_dim=False,
        l2_clip_norm=clip_norm,
    )
    total: Array = per_episode(*batch, is_padding_example=padding)
    return total


def noised_mean(
    key: Array,
    total: Array,
    clip_norm: float,
    noise_multiplier: float,
    expected_batch_size: int,
) -> Array:
    """(Σ + N(0, (noise_multiplier · C)²)) / expected batch size, for one agent."""
    if noise_multiplier > 0:
        privatizer = gaussian_privatizer(stddev=noise_multiplier * clip_norm, prng_key=key)
        total, _ = privatizer.update(total, privatizer.init(total))
    return total / expected_batch_size
