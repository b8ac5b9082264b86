"""The sampler: discrete Gaussian noise to within the stated distance."""

import math
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from pevdn.privacy import gaussian, mechanism


def test_the_tables_are_a_discrete_gaussian_to_within_the_stated_distance():
    """Exact: the mass that the alias tables give to every integer, against 100 digits."""
    size, full = len(gaussian.tables().aliases), 2**117
    thresholds = [
        sum(int(word) << shift for word, shift in zip(row, (96, 64, 32, 0), strict=True))
        for row in gaussian.tables().thresholds
    ]
    mass = [0] * size
    for j, (threshold, alias) in enumerate(zip(thresholds, gaussian.tables().aliases, strict=True)):
        assert 0 <= threshold < full
        mass[j] += threshold
        mass[alias] += full - threshold
    assert sum(mass) == 2**128
    with localcontext() as context:
        context.prec = 100
        values = range(-5000, 5001)  # beyond them there is less than e^-3000
        weights = {x: (-Decimal(x * x) / (2 * gaussian.BASE**2)).exp() for x in values}
        total = sum(weights.values())
        inside = {j - size // 2 + 1: m for j, m in enumerate(mass) if m}
        off = sum(abs(Decimal(inside.get(x, 0)) / 2**128 - w / total) for x, w in weights.items())
        assert set(inside) <= set(values)
        assert 4 * off / 2 < Decimal(gaussian.DISTANCE)  # four draws to one integer


@pytest.mark.parametrize("spread", [1, 256])
def test_a_convolution_of_discrete_gaussians_is_one(spread):
    """What the second convolution relies on, exactly, on distributions that fit into a table.

    k·Y + Y′ with Y, Y′ of deviation s is off by a factor of at most 1 ± 3ϑ, where ϑ is
    2·exp(−2π²s²/(k² + 1)). Here k = 2 and s = 4 (ϑ = 1e-27) stand in for 16 and 64 (1e-136).
    """
    k, s = 2, 4

    def weight(x, variance):
        return (-Decimal(x * x) / (2 * variance)).exp()

    with localcontext() as context:
        context.prec = 50
        values, wide = range(-150, 151), s * s * (k * k + 1)
        weights = {x: weight(x, s * s) for x in values}
        whole = sum(weight(z, wide) for z in range(-700, 701))
        theta = 2 * (-2 * Decimal(math.pi) ** 2 * s * s / (k * k + 1)).exp()
        for z in range(-60, 61, 7):
            pairs = sum(weights[x] * weights.get(z - k * x, 0) for x in values)
            found = pairs / sum(weights.values()) ** 2
            assert abs(found / (weight(z, wide) / whole) - 1) < 3 * theta
    first = gaussian.BASE**2 / (gaussian.FIRST**2 + 1)
    second = gaussian.BASE**2 * (gaussian.FIRST**2 + 1) / (spread**2 + 1)
    assert -2 * math.pi**2 * min(first, second) / math.log(2) < -400  # ϑ < 2⁻⁴⁰⁰ in the program


def test_noise_is_gaussian_in_the_body_and_in_the_tails():
    """Two million draws: moments and tail counts; each check fails by chance once in a million."""
    draw = jax.jit(lambda key: gaussian.discrete_gaussian(mechanism.words(key, 200_000), 256))
    x = np.concatenate([np.asarray(draw(jax.random.key(seed))) for seed in range(10)])
    x = x / gaussian.deviation(256)
    n = len(x)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (4, 3, 96), (6, 15, 10170)):
        assert abs((x**power).mean() - moment) < 4.9 * math.sqrt(variance / n)
    for size in (2.0, 3.0, 4.0):
        share = 2 * norm.sf(size)
        low, high = binom.interval(1 - 1e-6, n, share)
        assert low <= np.count_nonzero(np.abs(x) > size) <= high


def test_the_largest_noise_is_far_beyond_what_float32_normals_reach():
    """The sampler reaches more than 13 deviations; jax.random.normal ends at about 5.5."""
    largest = np.flatnonzero(gaussian.tables().thresholds.any(1))[-1]
    words = np.zeros((1, *gaussian.WORDS), np.uint32)
    words[..., 0] = largest << 21  # with no other bit set it is below the threshold
    assert gaussian.discrete_gaussian(words, 256)[0] / gaussian.deviation(256) > 13


@given(st.integers(0, 2**31), st.sampled_from(gaussian.SPREADS))
def test_numpy_and_jax_turn_the_same_words_into_the_same_noise(seed, spread):
    words = np.random.default_rng(seed).integers(0, 2**32, (50, *gaussian.WORDS), np.uint32)
    ours = gaussian.discrete_gaussian(words, spread)
    assert np.array_equal(ours, gaussian.discrete_gaussian(jnp.asarray(words), spread))
    assert ours.dtype == np.int32
