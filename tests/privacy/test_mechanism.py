"""One release: clipping, noise and divisor."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pevdn.config.settings import Settings
from pevdn.privacy import gaussian, mechanism
from pevdn.privacy.mechanism import SubsampledGaussian


def gaussian_release(clip_norm, noise, batch):
    settings = Settings(
        clip_norm=clip_norm,
        noise_multiplier=noise,
        expected_batch_size=batch,
        buffer_size=32 * batch,
    )
    return SubsampledGaussian.of(settings)


@given(
    st.integers(0, 2**31),
    st.floats(0.01, 10.0),
    st.sampled_from([0.05, 0.5, 1.344, 20.0]),
    st.sampled_from([1, 7, 3000]),
)
def test_no_episode_weighs_more_than_the_clip_norm(seed, clip_norm, noise, size):
    """In whole numbers and exactly: the sensitivity of the sum is at most C/unit = S/σ."""
    rng = np.random.default_rng(seed)
    release = gaussian_release(clip_norm, noise, 32)
    scales = rng.choice([1e-30, 1e-3, 1.0, 1e6, 1e30], size=(2, 4, 1))
    raw = [np.float32(rng.normal(size=(4, size)) * scale) for scale in scales]
    most = release.clip_norm / release.unit
    assert most == pytest.approx(gaussian.deviation(release.spread) / noise, rel=1e-12)
    for k in range(4):
        alone = release.total([x[k : k + 1] for x in raw], jnp.zeros(1, bool))
        weights = [int(np.sum(np.asarray(x).astype(object) ** 2)) for x in alone]
        assert sum(weights) <= most**2
    together = release.total(raw, jnp.zeros(4, bool))
    # As in the program, where an episode that is not sampled is an empty slot of the same part.
    apart = [release.total(raw, jnp.arange(4) != k) for k in range(4)]
    alone = [release.total([x[k : k + 1] for x in raw], jnp.zeros(1, bool)) for k in range(4)]
    for n, total in enumerate(together):
        assert np.array_equal(total, sum(np.asarray(one[n]) for one in apart))
        if jax.__version_info__ < (0, 11):  # which sums squares in another order for other shapes
            assert np.array_equal(total, sum(np.asarray(one[n]) for one in alone))


@given(st.integers(0, 2**31))
def test_a_clipped_gradient_keeps_its_direction_and_a_small_one_its_size(seed):
    rng = np.random.default_rng(seed)
    release = gaussian_release(0.6, 1.344, 32)
    sizes = rng.choice([1e-3, 1.0, 1e6], size=(3, 4, 1))
    raw = [np.float32(rng.normal(size=(4, 5)) * size) for size in sizes]
    found = release.as_floats(release.total(raw, jnp.zeros(4, bool)))
    whole = np.sqrt(sum((x**2).sum(1, keepdims=True) for x in raw))
    for ours, array in zip(found, raw, strict=True):
        expected = (array * np.minimum(1, 0.6 / whole)).sum(0)
        assert np.allclose(ours, expected, rtol=1e-3, atol=1e-3)


def test_padding_and_broken_gradients_add_nothing():
    raw = np.ones((3, 4), np.float32)
    raw[1] = np.nan
    release = gaussian_release(1.0, 1.0, 4)
    total = release.as_floats(release.total(raw, jnp.array([False, False, True])))
    assert np.allclose(total, 0.5, rtol=1e-3)  # one episode of norm 1 over four parameters


def test_without_noise_the_mean_is_over_the_expected_batch():
    release = gaussian_release(1.0, 0.0, 4)
    total = jnp.full(3, round(8.0 / release.unit), jnp.int32)
    assert np.allclose(release.mean(total, unreachable), 2.0, rtol=1e-6)


def unreachable(size):
    raise AssertionError("nothing is drawn without noise")


@pytest.mark.parametrize("noise", [0.001, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("batch", [1, 128, 4096])
def test_sums_of_many_episodes_stay_within_32_bits(noise, batch):
    """Twice the expected batch, all gradients along one parameter, noise of 16 deviations."""
    release = gaussian_release(0.2, noise, batch)
    if noise >= 0.05:  # below, ε is reported as infinite
        most = 2 * batch * release.clip_norm / release.unit
        assert most + 16 * gaussian.deviation(release.spread) < 2**31
    assert gaussian_release(0.2, 0.0, batch).unit * 2**31 > 0.2 * 2 * batch
    # The unit is far finer than the noise.
    assert release.unit < noise * 0.2 / 1000


def test_a_released_sum_has_the_noise_that_was_asked_for():
    """The released mean times the batch is the sum plus noise of deviation σC (χ², 1e-6)."""
    release = gaussian_release(0.2, 1.344, 128)
    total = jnp.zeros(100_000, jnp.int32)
    found = 128 * np.asarray(release.mean(total, lambda n: mechanism.words(jax.random.key(3), n)))
    ratio = (found.std() / (1.344 * 0.2)) ** 2
    assert abs(ratio - 1) < 4.9 * math.sqrt(2 / found.size)
