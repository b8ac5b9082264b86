"""The team's sum: exact, in range, and silent about everything else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from pevdn.errors import UsageError
from pevdn.exchange import modular
from pevdn.exchange.alone import alone
from pevdn.exchange.broadcast import broadcast
from pevdn.exchange.modular import add, negate
from pevdn.exchange.secret_shared import (
    Code,
    decode,
    encode,
    fits,
    saturate,
    secret_shared,
    split,
)

MODULI = [2**32, 2**31 - 1, 2**32 - 5, 2**31, 1_000_003, 101, 2]
KEY = jax.random.key(0)
# A statistical test fails on correct code once in a million runs.
ERROR_RATE = 1e-6


def uint32(values):
    return jnp.asarray(np.asarray(values, np.uint64).astype(np.uint32))


# ---- arithmetic modulo p ------------------------------------------------------------------


@pytest.mark.parametrize("p", MODULI)
def test_addition_and_negation_are_those_of_the_integers_modulo_p(p):
    rng = np.random.default_rng(p)
    edge = [0, 1 % p, p // 2, p - 1]
    a = np.concatenate([rng.integers(0, p, 1000), np.repeat(edge, 4)]).astype(object)
    b = np.concatenate([rng.integers(0, p, 1000), np.tile(edge, 4)]).astype(object)
    assert np.array_equal(np.asarray(add(uint32(a), uint32(b), p)), (a + b) % p)
    assert np.array_equal(np.asarray(negate(uint32(a), p)), (-a) % p)


@pytest.mark.parametrize("p", MODULI)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_all_n_shares_reconstruct_the_secret_exactly(p, n):
    secret = uint32(np.random.default_rng(n).integers(0, p, 500))
    shares = split(KEY, secret, n, p)
    assert shares.shape == (n, 500)
    assert int(shares.max()) < p
    assert np.array_equal(modular.total(shares, p), secret)


# ---- encoding -----------------------------------------------------------------------------


@given(
    st.floats(-0.999, 0.999),
    st.integers(0, 7),
    st.sampled_from([2**32, 2**31 - 1]),
    st.integers(2, 30),
)
def test_a_value_survives_encoding_to_one_unit_in_the_last_place(fraction, precision, p, n):
    code = Code(precision, p)
    x = np.float32(fraction * code.limit(n))
    back = float(decode(encode(jnp.float32(x), code), code))
    assert abs(back - float(x)) <= 10.0**-precision + np.spacing(np.abs(np.float32(x)))


def test_negative_numbers_are_the_upper_half_of_the_field():
    code = Code(precision=2, modulus=2**31 - 1)
    assert int(encode(jnp.float32(-1.25), code)) == 2**31 - 1 - 125
    assert float(decode(uint32([2**31 - 1 - 125])[0], code)) == -1.25


# ---- the sum ------------------------------------------------------------------------------


@given(
    st.integers(0, 2**31),
    st.sampled_from([2, 3, 5, 8]),
    st.sampled_from([0, 3, 5, 7]),
    st.sampled_from([2**32, 2**31 - 1]),
    st.sampled_from([1e-3, 0.3, 0.999]),
)
def test_the_secure_sum_differs_from_the_broadcast_sum_by_at_most_n_units(
    seed, n, precision, p, scale
):
    code = Code(precision, p)
    random = np.random.default_rng(seed).uniform(-1, 1, (n, 7, 3))
    messages = np.float32(random * scale * code.limit(n))
    opened = secret_shared(jax.random.key(seed), jnp.asarray(messages), code)
    exact = messages.astype(np.float64).sum(0)
    # What float32 itself can hold of the sum, and the allowed N · 10^−PRECISION.
    allowed = n * 10.0**-precision + np.spacing(np.abs(exact).astype(np.float32))
    assert float(opened.refused) == 0
    assert np.all(np.abs(np.asarray(opened.total, np.float64) - exact) <= allowed)


def test_every_agent_ends_with_the_same_total_except_when_alone():
    messages = jax.random.normal(KEY, (3, 4))
    assert np.array_equal(alone(KEY, messages).total, messages)
    for exchange in (broadcast, lambda k, m: secret_shared(k, m, Code())):
        total = exchange(KEY, messages).total
        assert np.allclose(total, messages.sum(0), atol=3e-5)
        assert np.array_equal(total[0], total[1])
        assert np.array_equal(total[0], total[2])


@given(st.integers(0, 3 * 4 * 5 - 1), st.sampled_from([1.000001, 1.0001, 100.0, np.inf, np.nan]))
def test_a_value_that_does_not_fit_is_reported_wherever_it_is(where, factor):
    code = Code(precision=5, modulus=2**31 - 1)
    messages = np.zeros(3 * 4 * 5, np.float32)
    for sign in (1, -1):
        messages[where] = sign * np.float32(code.limit(3)) * np.float32(factor)
        opened = secret_shared(KEY, jnp.asarray(messages.reshape(3, 4, 5)), code)
        assert float(opened.refused) >= code.limit(3) * (1 - 1e-6)


def test_values_just_inside_the_range_are_not_refused_and_their_sum_does_not_wrap():
    code = Code(precision=5)
    edge = np.nextafter(np.float32(code.limit(3)), np.float32(0))
    for sign in (1, -1):
        opened = secret_shared(KEY, jnp.full((3, 2), sign * edge), code)
        assert float(opened.refused) == 0
        assert np.allclose(opened.total, sign * 3 * edge, rtol=1e-6)


def test_the_range_counts_what_rounding_adds():
    """1.6 is below p/2n = 10/6 = 1.67 but is rounded to 2, and 3 · 2 = 6 stands for −4."""
    code = Code(precision=0, modulus=10)
    assert float(secret_shared(KEY, jnp.full((3, 1), 1.6), code).refused) == np.float32(1.6)
    assert float(secret_shared(KEY, jnp.full((3, 1), 1.4), code).total[0, 0]) == 3


@given(
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.integers(0, 7),
    st.sampled_from([13, 1000, 2**31 - 1, 2**32]),
)
def test_whatever_is_not_refused_sums_up_without_wrapping(seed, n, precision, p):
    """Messages around the edge of the range: refused, or their sum is right to n roundings."""
    code = Code(precision, p)
    rng = np.random.default_rng(seed)
    most = code.most(n) / 10**precision
    edges = rng.choice([-1, 1], (n, 6)) * (most + rng.uniform(-1.5, 1.5, (n, 6)) / 10**precision)
    for one in np.float32(edges).T:  # a column at a time: one refusal says nothing of the others
        opened = secret_shared(KEY, jnp.asarray(one[:, None]), code)
        if float(opened.refused) == 0:
            exact = one.astype(np.float64).sum()
            allowed = n * (0.5 / 10**precision + np.spacing(np.float32(most)))
            assert abs(float(opened.total[0, 0]) - exact) <= allowed


@given(st.integers(0, 2**31), st.sampled_from([13, 1000, 2**31 - 1, 2**32]), st.integers(0, 7))
def test_with_saturation_every_message_fits_and_those_that_fitted_stay(seed, p, precision):
    code, n = Code(precision, p), 3
    rng = np.random.default_rng(seed)
    wild = rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e30, code.limit(n), 0.0], (n, 20))
    messages = jnp.asarray(np.where(rng.random((n, 20)) < 0.5, wild, rng.normal(size=(n, 20))))
    tame = saturate(messages, code, n)
    assert np.all(fits(tame, code, n))
    fitted = np.asarray(jnp.abs(messages) <= code.most(n) / 10**precision * (1 - 1e-6))
    assert np.array_equal(np.asarray(tame)[fitted], np.asarray(messages)[fitted])
    assert np.all(np.asarray(tame)[np.isnan(messages)] == 0)
    opened = secret_shared(KEY, messages, code, saturating=True)
    assert float(opened.refused) == 0
    exact = np.asarray(tame, np.float64).sum(0)
    allowed = n * (0.5 / 10**precision + np.spacing(np.float32(code.limit(n))))
    assert np.all(np.abs(np.asarray(opened.total[0], np.float64) - exact) <= allowed)


def test_a_modulus_that_carries_no_message_is_refused():
    with pytest.raises(UsageError, match="modulus is 6, but the sum of 3 agents' messages needs"):
        Code(0, 6).checked(3)
    assert Code(0, 7).checked(3).most(3) == 1


# ---- secrecy ------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2**32, 2**31 - 1, 5])
@pytest.mark.parametrize("secret", [0, 1, "largest"])
def test_any_n_minus_1_shares_are_uniform_and_independent_of_the_secret(p, secret):
    """n = 3: each pair of shares falls evenly into all cells, whatever the secret is.

    χ² test of 3 pairs at a joint error rate of one in a million; a bias of 1 % in any cell of the
    25 would be found. If the pair is uniform on Z_p² for every secret, it does not depend on it.
    """
    s = p - 1 if secret == "largest" else secret
    shares = np.asarray(split(jax.random.key(s), uint32(np.full(500_000, s)), 3, p), np.float64)
    cells = np.floor(shares / p * 5).astype(int)
    for i, j in itertools.combinations(range(3), 2):
        counts = np.bincount(cells[i] * 5 + cells[j], minlength=25)
        assert chisquare(counts).pvalue > ERROR_RATE / 3


def test_one_agent_sees_nothing_of_another_in_the_shares_it_receives():
    """Correlation between a sender's message and the share it hands over: none (|z| < 5)."""
    code, n, size = Code(), 3, 200_000
    messages = jax.random.uniform(KEY, (size,), minval=-7000.0, maxval=7000.0)
    shares = np.asarray(split(jax.random.key(1), encode(messages, code), n, 2**32), np.float64)
    for share in shares:
        assert abs(np.corrcoef(share, messages)[0, 1]) * np.sqrt(size) < 5


def test_two_rounds_of_the_same_message_share_no_randomness():
    messages = jnp.ones((3, 10))
    split_now = lambda key: split(key, encode(messages[0], Code()), 3, 2**32)  # noqa: E731
    first, second = split_now(jax.random.key(1)), split_now(jax.random.key(2))
    assert not np.any(np.asarray(first) == np.asarray(second))
