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
from functools import partial
from typing import TypeVar

import jax
from jax import Array
from jax.flatten_util import ravel_pytree

Parameters = TypeVar("Parameters")  # of any network


def clipped_sum(
    gradients: Parameters, padding: Array, clip_norm: float, *, by_array: bool = False
) -> Parameters:
    """Σ over episodes of one agent's gradients (B, ...), each clipped to C as a whole.

    With `by_array` each of its n arrays is clipped to C/√n by itself, so that none takes the
    others' share; the whole then still is within C. `padding` (B,) marks entries that are not
    episodes. L2 sensitivity to emptying one episode: `clip_norm`, also when a gradient is not
    finite (it then counts as zero).
    """
    from jax_privacy.clipping import clipped_fun  # a second, which only private training needs

    arrays = len(jax.tree.leaves(gradients)) if by_array else 1
    norm = clip_norm / math.sqrt(arrays)
    clip = partial(
        clipped_fun(lambda one: one, keep_batch_dim=False, l2_clip_norm=norm),
        is_padding_example=padding,
    )
    total: Parameters = jax.tree.map(clip, gradients) if by_array else clip(gradients)
    return total


def noised_mean(
    key: Array,
    total: Parameters,
    clip_norm: float,
    noise_multiplier: float,
    expected_batch_size: int,
) -> Parameters:
    """(Σ + N(0, (noise_multiplier · C)²)) / expected batch size, for one agent."""
    from jax_privacy.noise_addition import gaussian_privatizer

    vector, as_parameters = ravel_pytree(total)
    if noise_multiplier > 0:
        privatizer = gaussian_privatizer(stddev=noise_multiplier * clip_norm, prng_key=key)
        vector, _ = privatizer.update(vector, privatizer.init(vector))
    mean: Parameters = as_parameters(vector / expected_batch_size)
    return mean
