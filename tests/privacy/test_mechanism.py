"""Differential privacy: what is added, what is counted, and what is not claimed."""

import math
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import binom, norm

from pevdn.errors import UsageError
from pevdn.privacy import accounting, gaussian, mechanism
from pevdn.privacy.accounting import Mechanism
from pevdn.privacy.mechanism import Release
from pevdn.privacy.planner import Plan

DELTA = 1024**-1.1  # the paper's 4.9e-4


@given(
    st.integers(0, 2**31),
    st.floats(0.01, 10.0),
    st.sampled_from([0.05, 0.5, 1.344, 20.0]),
    st.booleans(),
    st.sampled_from([1, 7, 3000]),
)
def test_no_episode_weighs_more_than_the_clip_norm(seed, clip_norm, noise, by_array, size):
    """In whole numbers and exactly: the sensitivity of the sum is at most C/unit = S/σ."""
    rng = np.random.default_rng(seed)
    release = Release(clip_norm, noise, 32, by_array)
    scales = rng.choice([1e-30, 1e-3, 1.0, 1e6, 1e30], size=(2, 4, 1))
    raw = [np.float32(rng.normal(size=(4, size)) * scale) for scale in scales]
    most = release.clip_norm / release.unit
    assert most == pytest.approx(gaussian.deviation(release.spread) / noise, rel=1e-12)
    for k in range(4):
        alone = release.clipped_sum([x[k : k + 1] for x in raw], jnp.zeros(1, bool))
        weights = [int(np.sum(np.asarray(x).astype(object) ** 2)) for x in alone]
        assert sum(weights) <= most**2
        if by_array:
            assert max(weights) <= most**2 / 2
    together = release.clipped_sum(raw, jnp.zeros(4, bool))
    apart = [release.clipped_sum([x[k : k + 1] for x in raw], jnp.zeros(1, bool)) for k in range(4)]
    for n, total in enumerate(together):
        assert np.array_equal(total, sum(np.asarray(one[n]) for one in apart))


@given(st.integers(0, 2**31), st.booleans())
def test_a_clipped_gradient_keeps_its_direction_and_a_small_one_its_size(seed, by_array):
    rng = np.random.default_rng(seed)
    release = Release(0.6, 1.344, 32, by_array)
    sizes = rng.choice([1e-3, 1.0, 1e6], size=(3, 4, 1))
    raw = [np.float32(rng.normal(size=(4, 5)) * size) for size in sizes]
    found = release.as_floats(release.clipped_sum(raw, jnp.zeros(4, bool)))
    whole = np.sqrt(sum((x**2).sum(1, keepdims=True) for x in raw))
    for ours, array in zip(found, raw, strict=True):
        share = 0.6 / np.sqrt(3) if by_array else 0.6
        norm = np.linalg.norm(array, axis=1, keepdims=True) if by_array else whole
        expected = (array * np.minimum(1, share / norm)).sum(0)
        assert np.allclose(ours, expected, rtol=1e-3, atol=1e-3)


def test_padding_and_broken_gradients_add_nothing():
    raw = np.ones((3, 4), np.float32)
    raw[1] = np.nan
    release = Release(1.0, 1.0, 4)
    total = release.as_floats(release.clipped_sum(raw, jnp.array([False, False, True])))
    assert np.allclose(total, 0.5, rtol=1e-3)  # one episode of norm 1 over four parameters


def test_without_noise_the_mean_is_over_the_expected_batch():
    release = Release(1.0, 0.0, 4)
    total = jnp.full(3, round(8.0 / release.unit), jnp.int32)
    assert np.allclose(release.mean(total, unreachable), 2.0, rtol=1e-6)


def unreachable(size):
    raise AssertionError("nothing is drawn without noise")


@pytest.mark.parametrize("noise", [0.001, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("batch", [1, 128, 4096])
def test_sums_of_many_episodes_stay_within_32_bits(noise, batch):
    """Twice the expected batch, all gradients along one parameter, noise of 16 deviations."""
    release = Release(0.2, noise, batch)
    if noise >= 0.05:  # below, ε is reported as infinite
        most = 2 * batch * release.clip_norm / release.unit
        assert most + 16 * gaussian.deviation(release.spread) < 2**31
    assert Release(0.2, 0.0, batch).unit * 2**31 > 0.2 * 2 * batch
    # The unit is far finer than the noise.
    assert release.unit < noise * 0.2 / 1000


# ---- the noise ----------------------------------------------------------------------------


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


def test_a_released_sum_has_the_noise_that_was_asked_for():
    """The released mean times the batch is the sum plus noise of deviation σC (χ², 1e-6)."""
    release = Release(0.2, 1.344, 128)
    total = jnp.zeros(100_000, jnp.int32)
    found = 128 * np.asarray(release.mean(total, lambda n: mechanism.words(jax.random.key(3), n)))
    ratio = (found.std() / (1.344 * 0.2)) ** 2
    assert abs(ratio - 1) < 4.9 * math.sqrt(2 / found.size)


# ---- accounting ---------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "expected"), [(0.8, 8.0), (1.0, 4.9), (1.5, 2.4)])
def test_epsilon_of_the_papers_buffer(noise, expected):
    """Buffer 1024, batch 32, one update an episode: known figures of PLD accounting."""
    assert accounting.epsilon(1024, 32 / 1024, noise, DELTA) == pytest.approx(expected, abs=0.1)


def test_one_unsampled_update_is_the_plain_gaussian_mechanism():
    """q = 1: δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ), solved for ε."""
    sigma = 1.3
    epsilon = accounting.epsilon(1, 1.0, sigma, 1e-3)
    delta = norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * norm.cdf(
        -0.5 / sigma - epsilon * sigma
    )
    assert delta == pytest.approx(1e-3, rel=0.01)


def test_the_team_figure_is_the_agent_figure_at_noise_over_root_n():
    mechanism = Mechanism(1 / 32, 1.5, 3, DELTA)
    spent = mechanism.spent(200)
    assert spent.epsilon_team == accounting.epsilon(200, 1 / 32, 1.5 / math.sqrt(3), DELTA)
    assert spent.epsilon_agent == accounting.epsilon(200, 1 / 32, 1.5, DELTA)
    assert spent.epsilon_team > spent.epsilon_agent


def test_nothing_is_spent_before_the_first_update_and_everything_without_noise():
    assert Mechanism(1 / 32, 1.0, 3, DELTA).spent(0)[:2] == (0.0, 0.0)
    assert Mechanism(1 / 32, 0.0, 3, DELTA).spent(5)[:2] == (math.inf, math.inf)


@pytest.mark.parametrize(
    ("noise", "opacus"),
    [(0.7, 12.869), (0.8, 9.167), (1.0, 5.585), (1.2, 3.969), (1.5, 2.765), (3.0, 1.091)],
)
def test_renyi_accounting_agrees_with_opacus(noise, opacus):
    """Opacus 1.6.0's compute_rdp and get_privacy_spent at its default orders, to 1 %."""
    ours = accounting.epsilon(1024, 1 / 32, noise, DELTA, accountant="rdp")
    assert ours == pytest.approx(opacus, rel=0.01)
    assert accounting.epsilon(1024, 1 / 32, noise, DELTA) < ours  # PLD is tighter


@given(
    st.integers(1, 400),
    st.floats(0.005, 0.5),
    st.floats(0.5, 5.0),
    st.floats(1e-6, 1e-2),
    st.sampled_from(["zero-out", "replace-one"]),
)
def test_epsilon_agrees_with_dp_accounting_called_directly(updates, rate, noise, delta, relation):
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    rules = {
        "zero-out": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace-one": dp.NeighboringRelation.REPLACE_ONE,
    }
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
    fine = PLDAccountant(rules[relation], value_discretization_interval=5e-4)
    direct = fine.compose(event, updates).get_epsilon(delta)
    ours = accounting.epsilon(updates, rate, noise, delta, relation)
    if direct < 25:
        assert ours == pytest.approx(direct, rel=0.01, abs=2e-3)
    else:  # as close, or infinite where e^ε outweighs the distance of the noise from a Gaussian
        assert ours >= direct * 0.99


class Account:
    """An account whose ε falls with δ as 1/δ would have it."""

    def __init__(self, at_one):
        self.at_one = at_one

    def get_epsilon(self, delta):
        return self.at_one - math.log(delta)


def test_what_the_noise_lacks_of_a_gaussian_is_taken_off_delta():
    """ε is that of δ − (1 + e^ε) · d or a smaller δ; where nothing would be left it is infinite."""
    for at_one in np.linspace(-10, 60, 71):
        found = accounting.at_delta(Account(at_one), 1e-6)
        if found == math.inf:
            continue
        left = 1e-6 - (1 + math.exp(found)) * accounting.DISTANCE
        assert left > 0 and found >= Account(at_one).get_epsilon(left)
    assert accounting.at_delta(Account(-10.0), 1e-6) < 4
    assert accounting.at_delta(Account(30.0), 1e-6) == math.inf


def test_the_accountant_counts_a_little_less_noise_than_is_added():
    """A discrete Gaussian of deviation S hides as much as a real one of √(S² − 16)."""
    least = min(gaussian.deviation(k) for k in gaussian.SPREADS)
    assert math.sqrt(least**2 - 16) / least > accounting.EXACTNESS
    (event,) = {accounting.Steps(1, 1.0, 2.0).event.event.event.noise_multiplier}
    assert event == 2.0 * accounting.EXACTNESS < 2.0


# ---- neighbouring relations ---------------------------------------------------------------


def hockey_stick(p, q, alpha):
    """∫ max(0, p − α q) for densities on a common grid."""
    return np.maximum(p - alpha * q, 0).sum()


def released(mean, rate, noise, grid):
    """Density of an update that samples an episode of gradient `mean` (D,) at a rate."""
    x = np.stack(np.meshgrid(*[grid] * len(mean), indexing="ij"), -1)

    def at(centre):
        return np.exp(-((x - centre) ** 2).sum(-1) / (2 * noise**2))

    density = (1 - rate) * at(np.zeros(len(mean))) + rate * at(np.asarray(mean))
    return density / (2 * math.pi * noise**2) ** (len(mean) / 2) * (grid[1] - grid[0]) ** len(mean)


@given(
    st.floats(0, 2 * math.pi),
    st.floats(0, 2 * math.pi),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0.05, 1.0),
    st.floats(-2.0, 2.0),
)
def test_no_replacement_is_worse_than_the_opposite_gradient(a, b, r, s, rate, log_alpha):
    """Replace-one is accounted for gradients C and −C; here any two in the ball, in the plane."""
    noise, grid, alpha = 1.0, np.linspace(-7, 7, 141), math.exp(log_alpha)
    one, other = (np.array([t * math.cos(u), t * math.sin(u)]) for t, u in ((r, a), (s, b)))
    found = hockey_stick(
        released(one, rate, noise, grid), released(other, rate, noise, grid), alpha
    )
    worst = hockey_stick(
        released([1.0], rate, noise, grid), released([-1.0], rate, noise, grid), alpha
    )
    assert found <= worst + 1e-6


def test_replacing_costs_more_than_emptying_and_less_than_emptying_twice():
    """Twice: group privacy gives (2ε, (1 + e^ε)δ) for two steps of zero-out."""
    epsilon = accounting.epsilon(100, 1 / 32, 2.0, 1e-4)
    replaced = accounting.epsilon(100, 1 / 32, 2.0, 1e-4, "replace-one")
    both = (1 + math.exp(epsilon)) * 1e-4
    assert epsilon < replaced
    assert accounting.epsilon(100, 1 / 32, 2.0, both, "replace-one") <= 2 * epsilon


def test_a_missing_episode_changes_who_else_is_in_the_buffer():
    """Why add-or-remove costs what replace-one costs: the buffer, with and without episode 5."""
    size, differing = 4, []
    for clock in range(12):
        stream = list(range(clock + 1))
        there, missing = stream[-size:], [e for e in stream if e != 5][-size:]
        differing.append((set(there) - set(missing), set(missing) - set(there)))
    changed = [d for d in differing if d != (set(), set())]
    assert changed == [({5}, {clock - size}) for clock in range(5, 9)]  # an older one instead
    assert accounting.epsilon(64, 1 / 4, 2.0, DELTA, "add-or-remove") == accounting.epsilon(
        64, 1 / 4, 2.0, DELTA, "replace-one"
    )


# ---- the paper's theorem ------------------------------------------------------------------


def test_theorem_1_claims_less_than_is_lost():
    """The counter-example in closed form: no subsampling, noise 32, buffer 1024, throughput 4.

    An update happens with probability 1/4, visibly. Given that n of 1024 happened while the
    episode was there, what the observer saw is one Gaussian of sensitivity √n and noise 32. The
    theorem claims (0.84, 1.2e-4); the true δ at that ε is more than a hundred times as large.
    """
    noise, size, throughput = 32.0, 1024, 4
    delta = DELTA / throughput

    def lost(claim):
        """δ at ε = claim: the mean over the number n of updates that happened, all of them seen."""
        n = np.arange(1, size + 1)
        shift = np.sqrt(n) / noise
        given_n = norm.cdf(shift / 2 - claim / shift) - math.exp(claim) * norm.cdf(
            -shift / 2 - claim / shift
        )
        return float(np.sum(binom.pmf(n, size, 1 / throughput) * given_n))

    exact = accounting.epsilon(size, 1.0, noise, DELTA) / throughput  # by an exact accountant
    assert (exact, delta) == (pytest.approx(0.84, abs=0.01), pytest.approx(1.2e-4, rel=0.02))
    assert lost(exact) == pytest.approx(1.4e-2, rel=0.05)
    assert lost(exact) > 100 * delta
    moments = accounting.theorem_1(size, throughput, 1.0, noise, DELTA)  # by the paper's
    assert moments == (pytest.approx(0.937, abs=0.01), delta)
    assert lost(moments[0]) > 50 * delta
    # What is accounted here covers it: the exposure that a plan allows for.
    plan = Plan(size, size, throughput, noise, DELTA, agents=1)
    assert lost(plan.epsilon("team")) < DELTA


def test_theorem_1_is_the_moments_accountant_when_every_update_happens():
    claim, delta = accounting.theorem_1(1024, 1, 1 / 32, 1.0, DELTA)
    assert claim == accounting.epsilon(1024, 1 / 32, 1.0, DELTA, accountant="rdp")
    assert delta == DELTA


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sampling_rate": 1.5}, "sampling rate q is 1.5"),
        ({"sampling_rate": 0.0}, "sampling rate q is 0"),
        ({"delta": 0.0}, "delta is 0, but must be between 0 and 1"),
        ({"delta": 1.0}, "delta is 1, but must be between 0 and 1"),
        ({"relation": "zero"}, "did you mean 'zero-out'"),
    ],
)
def test_a_mechanism_out_of_range_is_named(changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        Mechanism(1 / 32, 1.0, 3, DELTA)._replace(**changes).checked()


def test_the_affordable_exposure_is_the_last_within_the_budget():
    mechanism = Mechanism(1 / 8, 1.0, 3, 1e-2)
    n = mechanism.affordable(2.0, "team", 1000)
    assert mechanism.epsilon(n, "team") <= 2.0 < mechanism.epsilon(n + 1, "team")
    assert mechanism.affordable(1e9, "team", 50) == 50
    assert mechanism.affordable(1e-9, "team", 50) == 0


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
