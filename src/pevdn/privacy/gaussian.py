"""Sample discrete Gaussian noise within a known, tiny distance of the exact distribution.

`jax.random.normal` in float32 never leaves ±5.5 standard deviations and takes few values there:
its noise is not Gaussian where (ε, δ) depends on it, in the tails and in the low bits. This module
turns uniform words into integers W with Pr[W = w] ∝ exp(−w²/2S²), in integer arithmetic alone:

1. *Base.* A discrete Gaussian of deviation 64 by Walker's alias method. Its probabilities are whole
   multiples of 2⁻¹²⁸, rounded from 60 decimal digits, and each draw uses 128 uniform bits.
2. *Convolution.* 16·X + X′ of two base draws is a discrete Gaussian of deviation 64·√257, and
   k·Y + Y′ of two of those has deviation S = 64·√257·√(k² + 1), both up to a factor 1 ± 2⁻⁴⁰⁰
   (Micciancio and Walter, 2017; docs/privacy.md has the argument).

For perfectly uniform words W is within `DISTANCE` of a discrete Gaussian in total variation
(`test_the_tables_are_a_discrete_gaussian_to_within_the_stated_distance` computes it exactly).
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np

BASE = 64  # deviation of the base distribution
FIRST = 16  # multiplier of the first convolution
SPREADS = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # multipliers k of the second, best first
WORDS = (4, 4)  # uniform 32-bit words per integer: four base draws of four words
DISTANCE = 2.0**-114  # total variation distance of one integer

_INDEX_BITS = 11
_SIZE = 2**_INDEX_BITS
_LARGEST = _SIZE // 2 - 1  # of a base draw: 16 deviations; the tails beyond hold less than 2⁻¹⁸⁰
_REST_BITS = 32 - _INDEX_BITS  # of the first word, beside the index


def deviation(spread: int) -> float:
    """Return S of noise with multiplier k = `spread` in the second convolution."""
    return BASE * math.sqrt((FIRST**2 + 1) * (spread**2 + 1))


class Tables(NamedTuple):
    """Walker's alias method: entry j gives j if the remaining bits are below its threshold."""

    thresholds: np.ndarray  # (_SIZE, 4) uint32: 21 bits, then three words, most significant first
    aliases: np.ndarray  # (_SIZE,) int32


def probabilities() -> list[int]:
    """Return Pr[−_LARGEST … _LARGEST] of a base draw, and one 0, in units of 2⁻¹²⁸."""
    with localcontext() as context:
        context.prec = 60
        values = [j - _LARGEST for j in range(_SIZE - 1)]
        weights = [(-Decimal(x * x) / (2 * BASE**2)).exp() for x in values]
        total = sum(weights)
        units = [int((w / total * 2**128).to_integral_value()) for w in weights] + [0]
    units[_LARGEST] += 2**128 - sum(units)  # the rounding error goes to 0, the most likely draw
    return units


@cache
def tables() -> Tables:
    """Build the tables by Vose's method, exactly: every entry holds a mass of 2¹¹⁷ units."""
    full = 2 ** (128 - _INDEX_BITS)
    mass = probabilities()
    aliases, thresholds = list(range(_SIZE)), [0] * _SIZE
    small = [j for j, m in enumerate(mass) if m < full]
    large = [j for j, m in enumerate(mass) if m >= full]
    while small and large:
        below, above = small.pop(), large.pop()
        thresholds[below], aliases[below] = mass[below], above
        mass[above] -= full - mass[below]
        (small if mass[above] < full else large).append(above)
    words = [[t >> 96, *((t >> shift) & 0xFFFFFFFF for shift in (64, 32, 0))] for t in thresholds]
    return Tables(np.array(words, np.uint32), np.array(aliases, np.int32))


def _base(words: Any, xp: Any) -> Any:
    """Return one base draw (...) from four uniform words (..., 4)."""
    thresholds, aliases = (xp.asarray(table) for table in tables())
    index = (words[..., 0] >> _REST_BITS).astype(np.int32)
    rest = [words[..., 0] & np.uint32(2**_REST_BITS - 1), *(words[..., i] for i in (1, 2, 3))]
    limit = thresholds[index]
    below = rest[3] < limit[..., 3]
    for i in (2, 1, 0):
        below = (rest[i] < limit[..., i]) | ((rest[i] == limit[..., i]) & below)
    return xp.where(below, index, aliases[index]) - np.int32(_LARGEST)


def discrete_gaussian(words: Any, spread: int) -> Any:
    """Return integers (...) of deviation S = `deviation(spread)` from uint32 words (..., 4, 4).

    Equal words give equal integers in NumPy and in JAX.
    """
    if isinstance(words, np.ndarray):
        xp: Any = np
    else:
        import jax.numpy as xp
    x = _base(words, xp)  # (..., 4)
    y = FIRST * x[..., 0] + x[..., 1], FIRST * x[..., 2] + x[..., 3]
    return np.int32(spread) * y[0] + y[1]
