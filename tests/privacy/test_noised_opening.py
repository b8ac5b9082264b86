"""One agent's side of a noised opening: clip, noise and what is subtracted, in whole units."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from pevdn.config.settings import Settings
from pevdn.errors import UsageError
from pevdn.exchange import modular
from pevdn.privacy import gaussian, mechanism
from pevdn.privacy.mechanism import NoisedOpening

RARE = 1e-6  # how often a statistical test of this file may fail by chance


def opening(n_agents=3, **settings):
    return NoisedOpening.of(Settings(**settings), n_agents)


def exact_norm(units):
    return math.sqrt(int(np.sum(np.asarray(units).astype(object) ** 2)))


ANY = st.one_of(
    st.floats(width=32),  # also NaN, infinities and subnormal numbers
    st.sampled_from([math.nan, math.inf, -math.inf, 1e38, -1e38, 3.4e38, 1e-38, 1e-45, 0.0]),
)


@given(
    st.lists(ANY, min_size=1, max_size=60),
    st.sampled_from([1e-12, 0.05, 0.5, 1e4]),
    st.sampled_from([0.0, 0.05, 0.9, 30.0]),
    st.sampled_from([(2, 0), (3, 1), (8, 0)]),
    st.sampled_from([2**32, 2**31 - 1]),
)
def test_no_record_weighs_more_than_the_message_norm(messages, norm, noise, team, modulus):
    """In unbounded integers: the sensitivity of the sum is at most M/unit, whatever is sent."""
    n, t = team
    of = opening(n, message_norm=norm, opening_noise=noise, colluders=t, modulus=modulus)
    units = of.clip(jnp.array(messages, jnp.float32))
    assert units.dtype == jnp.int32 and exact_norm(units) <= of.message_norm / of.unit
    if noise:  # in deviations of the noise of the agents that no coalition has: s = M · noise
        honest = math.sqrt(n - of.colluders) * gaussian.deviation(of.spread)
        assert of.message_norm / of.unit == pytest.approx(honest / noise, rel=1e-12)


@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e6, 1e28]))
def test_a_clipped_record_keeps_its_direction_and_a_small_one_its_size(seed, size):
    of, rng = opening(message_norm=0.5), np.random.default_rng(seed)
    raw = np.float32(rng.normal(size=20) * size)
    kept = np.asarray(of.clip(jnp.asarray(raw)), np.float64) * of.unit
    exact = raw * min(1.0, 0.5 / np.linalg.norm(raw.astype(np.float64)))
    assert np.allclose(kept, exact, rtol=1e-3, atol=of.unit)


def test_numbers_that_are_not_finite_count_as_zero():
    of = opening(message_norm=0.5)
    broken = jnp.array([0.3, jnp.nan, jnp.inf, -jnp.inf, -0.4])
    kept = np.asarray(of.clip(broken)) * of.unit
    assert np.allclose(kept, [0.3, 0, 0, 0, -0.4], atol=1e-3)
    assert not np.any(of.clip(jnp.full(5, jnp.nan)))
    assert not np.any(of.clip(jnp.zeros(5)))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_the_agents_outside_any_coalition_add_the_noise_that_is_claimed(n):
    """N − t shares of variance s²/(N − t) are s², from the unit alone: nothing is rounded."""
    for t in range(1 if n > 1 else 0, max(n, 1)):
        of = opening(n, message_norm=0.3, opening_noise=0.7, colluders=t)
        assert of.colluders == t
        own = gaussian.deviation(of.spread) * of.unit
        assert (n - t) * own**2 == pytest.approx((0.3 * 0.7) ** 2, rel=1e-12)
        assert of.removes_own_noise == (t == n - 1)
    assert opening(n).colluders == n - 1  # the default: all but one


def test_the_noise_of_one_agent_has_the_stated_variance():
    """100,000 draws: (n − 1)·s²/σ² is χ² (an error of one in a million)."""
    of = opening(5, message_norm=0.5, opening_noise=1.3, colluders=2)
    words = mechanism.words(jax.random.key(1), 100, 1000)
    noise = np.asarray(of.noise(words), np.float64).ravel() * of.unit
    ratio = np.sum(noise**2) / ((0.5 * 1.3) ** 2 / 3)
    low, high = chi2.ppf([RARE / 2, 1 - RARE / 2], noise.size)
    assert low < ratio < high
    silent = opening(5, opening_noise=0.0)
    assert not np.any(silent.noise(words))


@given(st.integers(0, 2**31), st.sampled_from([2**32, 2**31 - 1, 10**9 + 7]))
def test_what_is_left_of_a_sum_is_what_the_others_sent(seed, modulus):
    of, rng = opening(4, modulus=modulus), np.random.default_rng(seed)
    limit = (modulus - 1) // 2 // 8
    sent = rng.integers(-limit, limit, (4, 50))
    words = [of.encode(jnp.asarray(x, jnp.int32)) for x in sent]
    assert all(np.all(np.asarray(w, np.uint64) < modulus) for w in words)
    total = modular.total(jnp.stack(words), modulus)
    rest = of.others(total, jnp.asarray(sent[0], jnp.int32))
    assert np.allclose(rest, sent[1:].sum(0) * of.unit, rtol=2e-7, atol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 27, 64])
@pytest.mark.parametrize("noise", [0.3, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("t", [0, 1])
def test_no_sum_wraps_around_at_the_default_modulus(n, noise, t):
    """All records clipped at the same step, and noise of 18 standard deviations: below p/2."""
    of = opening(n, opening_noise=noise, colluders=t if n > 1 else 0)
    worst = jnp.zeros(60).at[7].set(1e38)
    units = int(np.abs(of.clip(worst)).max())
    assert units > 0.99 * of.message_norm / of.unit
    largest = n * units + 18 * math.sqrt(n) * gaussian.deviation(of.spread)
    assert largest < of.modulus // 2
    assert of.unit < of.message_norm * noise / 500  # and the unit is far below the noise


def test_without_noise_a_sum_fits_too():
    for n in (1, 2, 8, 64):
        of = opening(n, opening_noise=0.0)
        assert n * of.message_norm / of.unit < of.modulus // 2


@pytest.mark.parametrize(
    "settings, told",
    [
        (
            {"modulus": 1000},
            "modulus is 1000, but the noised sum of 3 agents' messages at opening_noise=1 needs a "
            "larger one; raise it.",
        ),
        (
            {"colluders": 3},
            "colluders is 3, but at most 2 of 3 agents can pool what they see against another; "
            "lower it, or leave it out for all but one.",
        ),
    ],
)
def test_a_sum_that_cannot_be_hidden_is_refused_in_one_sentence(settings, told):
    with pytest.raises(UsageError) as refused:
        opening(3, **settings)
    assert str(refused.value) == told
