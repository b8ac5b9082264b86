"""Differential privacy: what is added, what is counted, and what is not claimed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from pevdn.privacy import accounting, mechanism

DELTA = 1024**-1.1  # the paper's 4.9e-4


def as_it_is(gradient):
    return gradient


@given(st.integers(0, 2**31), st.floats(0.01, 10.0))
def test_no_episode_weighs_more_than_the_clip_norm(seed, clip_norm):
    rng = np.random.default_rng(seed)
    raw = np.float32(rng.normal(size=(4, 5)) * rng.choice([1e-3, 1.0, 1e6], size=(4, 1)))
    size = np.linalg.norm(raw, axis=1, keepdims=True)
    expected = (raw * np.minimum(1, clip_norm / size)).sum(0)
    total = mechanism.clipped_sum(as_it_is, (raw,), jnp.zeros(4, bool), clip_norm)
    assert np.allclose(total, expected, rtol=1e-3, atol=1e-3 * clip_norm)
    alone = mechanism.clipped_sum(as_it_is, (raw[:1],), jnp.zeros(1, bool), clip_norm)
    assert float(jnp.linalg.norm(alone)) <= clip_norm * (1 + 1e-5)


def test_padding_and_broken_gradients_add_nothing():
    raw = np.ones((3, 4), np.float32)
    raw[1] = np.nan
    total = mechanism.clipped_sum(as_it_is, (raw,), jnp.array([False, False, True]), 1.0)
    assert np.allclose(total, 0.5)  # one episode of norm 1 over four parameters


def test_without_noise_the_mean_is_over_the_expected_batch():
    mean = mechanism.noised_mean(jax.random.key(0), jnp.full(3, 8.0), 1.0, 0.0, 4)
    assert mean.tolist() == [2.0, 2.0, 2.0]


# ---- accounting ---------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "expected"), [(0.8, 8.0), (1.0, 4.9), (1.5, 2.4)])
def test_epsilon_of_the_papers_buffer(noise, expected):
    """Buffer 1024, batch 32, one update an episode: known figures of PLD accounting."""
    assert accounting.epsilon(1024, 32 / 1024, noise, DELTA) == pytest.approx(expected, abs=0.1)


def test_epsilon_is_never_below_dp_accounting_called_directly():
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    event = dp.PoissonSampledDpEvent(1 / 32, dp.GaussianDpEvent(1.2))
    direct = PLDAccountant().compose(event, 300).get_epsilon(DELTA)
    ours = accounting.epsilon(300, 1 / 32, 1.2, DELTA)
    assert direct - 1e-9 <= ours <= direct * 1.01


def test_one_unsampled_update_is_the_plain_gaussian_mechanism():
    """q = 1: δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ), solved for ε."""
    sigma = 1.3
    epsilon = accounting.epsilon(1, 1.0, sigma, 1e-3)
    delta = norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * norm.cdf(
        -0.5 / sigma - epsilon * sigma
    )
    assert delta == pytest.approx(1e-3, rel=0.01)


def test_the_team_figure_is_the_agent_figure_at_noise_over_root_n():
    spent = accounting.spent(200, 1 / 32, 1.5, DELTA, 3)
    assert spent.epsilon_team == accounting.epsilon(200, 1 / 32, 1.5 / math.sqrt(3), DELTA)
    assert spent.epsilon_agent == accounting.epsilon(200, 1 / 32, 1.5, DELTA)
    assert spent.epsilon_team > spent.epsilon_agent


def test_nothing_is_spent_before_the_first_update_and_everything_without_noise():
    assert accounting.spent(0, 1 / 32, 1.0, DELTA, 3)[:2] == (0.0, 0.0)
    assert accounting.spent(5, 1 / 32, 0.0, DELTA, 3)[:2] == (math.inf, math.inf)


def test_more_updates_cost_more():
    spent = [accounting.epsilon(n, 1 / 32, 1.0, DELTA) for n in (1, 8, 64, 512)]
    assert spent == sorted(spent)
    assert spent[0] < spent[-1]


def test_the_agent_figure_alone_does_not_bound_an_observer_of_one_agent():
    """Why `epsilon_agent` is called conditional, in numbers.

    Two agents, one update on an episode that is there or not (b = 1 or 0), q = 1, C = 1. Agent i
    releases b + σZ. Its teammate's parameters get b + σZ' as well, and are not seen. In the next
    update, made of other episodes only, the sign of the team error (and so of many clipped
    gradients at once) may depend on whether the teammate's parameter is above ½: agent i's step
    then tells that bit almost without noise. The joint loss of (b + σZ, 1[b + σZ' > ½]) exceeds
    what one Gaussian of noise σ allows, and stays within the two Gaussians of the team figure.
    """
    sigma, delta = 2.0, 1e-3
    claimed = accounting.epsilon(1, 1.0, sigma, delta)
    proven = accounting.epsilon(1, 1.0, sigma / math.sqrt(2), delta)
    above = norm.cdf(0.5 / sigma)  # the bit is right with this probability

    def true_delta(epsilon: float) -> float:
        total, factor = 0.0, math.exp(epsilon)
        for with_it, without in ((above, 1 - above), (1 - above, above)):

            def excess(x, p=with_it, q=factor * without):
                return max(0.0, p * norm.pdf(x, 1, sigma) - q * norm.pdf(x, 0, sigma))

            total += quad(excess, -10 * sigma, 20 * sigma, limit=500)[0]
        return total

    assert true_delta(claimed) > 2 * delta
    assert true_delta(proven) <= delta
