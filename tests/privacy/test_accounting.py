"""The accountant: ε of composed updates, and the limits of each claim."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import binom, norm

from pevdn.errors import UsageError
from pevdn.privacy import accounting, gaussian
from pevdn.privacy.accounting import Mechanism
from pevdn.privacy.planner import Plan

DELTA = 1024**-1.1  # the paper's 4.9e-4


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
    """An account with ε = at_one − log δ."""

    def __init__(self, at_one):
        self.at_one = at_one

    def get_epsilon(self, delta):
        return self.at_one - math.log(delta)


def test_what_the_noise_lacks_of_a_gaussian_is_taken_off_delta():
    """ε is that of δ − (1 + e^ε) · d or a smaller δ; it is infinite if nothing is left of δ."""
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
