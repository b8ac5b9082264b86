"""ε record: what a coalition of teammates and outsiders learns about one agent's record."""

from __future__ import annotations

import math

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from pevdn.config import experiment as config
from pevdn.errors import UsageError
from pevdn.privacy import accounting, gaussian
from pevdn.privacy.accounting import Mechanism
from pevdn.privacy.mechanism import NoisedOpening, SubsampledGaussian
from pevdn.privacy.planner import Plan

DELTA = 4.88e-4
# Buffer 8192, batch 128, an update every 4 episodes: E 2048, q 1/64.
KNOWN = Mechanism(1 / 64, 0.8, 3, DELTA, openings=1, opening_noise=0.704, colluders=2)
SMALL = Mechanism(1 / 8, 1.0, 3, 1e-3, openings=2, opening_noise=1.5, colluders=1)


def direct(*parts: tuple[int, float, float], delta: float, interval: float = 1e-4) -> float:
    """ε of mechanisms (number, sampling rate, noise) by dp-accounting alone, without sampling 1."""
    account = PLDAccountant(
        dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=interval
    )
    for number, rate, noise in parts:
        event = dp.GaussianDpEvent(noise)
        event = event if rate == 1 else dp.PoissonSampledDpEvent(rate, event)
        account.compose(event, number)
    return float(account.get_epsilon(delta))


def plain_gaussian(noise: float, delta: float) -> float:
    """ε of one Gaussian mechanism in closed form."""

    def excess(epsilon: float) -> float:
        a, b = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
        return float(norm.cdf(a) - math.exp(epsilon) * norm.cdf(b) - delta)

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, 300.0))


def test_a_known_recipe_costs_what_dp_accounting_says() -> None:
    updates, opening = (2048, 1 / 64, 0.8), (1, 1.0, 0.704)
    wanted = direct(updates, opening, delta=DELTA)
    assert wanted == pytest.approx(8.0, abs=0.01)
    found = KNOWN.spent(2048)
    assert wanted <= found.epsilon_record <= 1.001 * wanted
    assert found.epsilon_agent == pytest.approx(direct(updates, delta=DELTA), rel=1e-3)
    whole = direct((3 * 2048, 1 / 64, 0.8), delta=DELTA)
    assert found.epsilon_team == pytest.approx(whole, rel=1e-3)


def test_a_whole_episode_against_a_coalition_costs_what_all_others_add_up_to() -> None:
    """Two honest agents of three: twice the updates, twice the norm; 16.5 in RECORD.md."""
    against_one = KNOWN._replace(colluders=1)
    wanted = direct((2 * 2048, 1 / 64, 0.8), (1, 1.0, 0.704 / 2), delta=DELTA)
    assert wanted == pytest.approx(16.5, abs=0.05)
    assert against_one.epsilon(2048, "coalition") == pytest.approx(wanted, rel=1e-3)
    alone = Mechanism(1 / 64, 0.8, 2, DELTA, openings=1, opening_noise=0.704, colluders=1)
    assert alone.epsilon(2048, "coalition") == alone.epsilon(2048, "record")


def test_noise_of_different_size_is_composed_on_a_grid_that_is_fine_enough() -> None:
    for sigma, s in ((0.5, 6.0), (6.0, 0.5), (0.8, 40.0)):
        mechanism = SMALL._replace(noise_multiplier=sigma, opening_noise=s)
        wanted = direct((32, 1 / 8, sigma), (2, 1.0, s), delta=1e-3, interval=2e-4)
        assert 0.9999 * wanted <= mechanism.epsilon(32, "record") <= 1.002 * wanted


changes = st.sampled_from(
    [
        ("sampling_rate", 2.0),
        ("noise_multiplier", 0.8),
        ("delta", 0.5),
        ("opening_noise", 0.8),
        ("openings", 2),
    ]
)


@settings(max_examples=12)
@given(
    st.builds(
        Mechanism,
        st.floats(0.01, 0.4),
        st.floats(0.5, 4.0),
        st.integers(2, 5),
        st.floats(1e-6, 1e-2),
        openings=st.integers(1, 4),
        opening_noise=st.floats(0.5, 6.0),
        colluders=st.just(1),
    ),
    st.integers(1, 64),
    changes,
)
def test_epsilon_record_grows_with_all_that_an_observer_gains(mechanism, updates, change) -> None:
    def cost(some: Mechanism, updates: int = updates) -> float:
        return some.epsilon(updates, "record", coarseness=4.0)

    before, (name, factor) = cost(mechanism), change
    worse = cost(mechanism._replace(**{name: type(factor)(getattr(mechanism, name) * factor)}))
    assert worse >= before * 0.999
    assert cost(mechanism, updates + 16) >= before * 0.999
    assert before == cost(mechanism._replace(n_agents=7, colluders=6))  # however large the team


@settings(max_examples=15)
@given(st.integers(1, 200), st.floats(0.005, 0.3), st.floats(0.6, 3.0), st.floats(0.4, 4.0))
def test_epsilon_record_is_no_smaller_than_either_part_alone(updates, rate, sigma, s) -> None:
    mechanism = SMALL._replace(sampling_rate=rate, noise_multiplier=sigma, opening_noise=s)
    found = mechanism._replace(openings=1).epsilon(updates, "record", coarseness=4.0)
    assert found >= plain_gaussian(s, mechanism.delta)
    learnt = accounting.epsilon(updates, rate, sigma, mechanism.delta, coarseness=4.0)
    assert found >= 0.999 * learnt


def test_n_openings_without_updates_are_one_gaussian_with_less_noise() -> None:
    for n in (1, 2, 9):
        found = SMALL._replace(openings=n).epsilon(0, "record")
        assert found == pytest.approx(plain_gaussian(1.5 / math.sqrt(n), 1e-3), rel=1e-3)


def test_without_noise_in_an_opening_only_outsiders_are_kept_out() -> None:
    bare = SMALL._replace(opening_noise=0.0)
    found = bare.spent(8)
    assert found.epsilon_record == bare.epsilon(8, "coalition") == math.inf
    assert found.epsilon_team == SMALL.spent(8).epsilon_team < math.inf
    silent = SMALL._replace(noise_multiplier=0.0)
    assert silent.spent(8).epsilon_record == math.inf
    assert silent.spent(0).epsilon_record < math.inf  # no update was made


def test_a_record_is_an_observer_only_where_openings_are_noised() -> None:
    bare = Mechanism(1 / 8, 1.0, 3, 1e-3)
    assert bare.observers == ("team", "agent")
    assert bare.spent(8).epsilon_record is None and "epsilon_record" not in bare.spent(8).known
    assert SMALL.observers == ("record", "team", "agent")
    assert next(iter(SMALL.spent(8).known)) == "epsilon_record"
    assert SMALL.spent(8, openings=0).epsilon_record == SMALL.spent(8).epsilon_agent


def test_own_samples_replace_the_root_of_n_in_the_noise() -> None:
    """As outsiders see it: N times the updates at σ, instead of E updates at σ/√N."""
    joint = SMALL._replace(openings=0)
    assert joint.epsilon(50, "team") == accounting.epsilon(50, 1 / 8, 1 / math.sqrt(3), 1e-3)
    assert SMALL.epsilon(50, "team") == accounting.epsilon(150, 1 / 8, 1.0, 1e-3)
    assert SMALL.epsilon(50, "team") < joint.epsilon(50, "team")
    assert SMALL.noise_seen("team") == 1.0 > joint.noise_seen("team")


def test_the_sentence_about_a_teammate_names_what_holds() -> None:
    assert accounting.teammate(SMALL._replace(openings=0)).startswith("none: a teammate sees")
    said = accounting.teammate(SMALL, 3.21)
    assert "ε record 3.21" in said and "t = 1" in said and "n = 2" in said and "none" not in said
    assert "infinite at opening_noise 1.5" in accounting.teammate(SMALL, math.inf)


def test_noised_openings_are_accounted_for_one_relation_only() -> None:
    with pytest.raises(UsageError, match="noised openings are accounted for with 'zero-out' only"):
        SMALL._replace(relation="replace-one").checked()


def test_the_noise_of_openings_counts_towards_what_the_error_bound_covers() -> None:
    accounting.check_size(2, 2**34, 2**35)
    with pytest.raises(UsageError, match="noises more than"):
        accounting.check_size(2, 2**34, 2**35 + 1)


@pytest.mark.parametrize(("asked", "agents", "t"), [(0, 3, 2), (1, 3, 1), (0, 2, 1), (0, 1, 0)])
def test_what_is_planned_is_what_the_release_and_the_opening_account_for(asked, agents, t) -> None:
    own = {"openings": 2, "opening_noise": 0.9, "colluders": asked}
    wanted = config.make("pe-vdn-d", "toy:two-step", 1000, settings=own)
    s = wanted.settings
    opening = NoisedOpening.of(s, agents)
    release = SubsampledGaussian.of(s).accounted(agents, wanted.delta, s.relation)
    planned = Plan.of(wanted, agents).mechanism
    assert opening.accounted(release) == planned
    assert (planned.openings, planned.opening_noise, planned.colluders) == (2, 0.9, t)


def test_the_sum_of_the_others_noise_has_the_accounted_deviation() -> None:
    """N − t agents outside a coalition add s²/(N − t) each; units never fall below the proof's."""
    for agents, asked in ((2, 1), (3, 1), (5, 2), (8, 7)):
        s = config.make("pe-vdn-d", settings={"colluders": asked, "opening_noise": 0.7}).settings
        opening = NoisedOpening.of(s, agents)
        each = gaussian.deviation(opening.spread) * opening.unit / opening.message_norm
        assert each * math.sqrt(agents - asked) == pytest.approx(0.7)
        assert gaussian.deviation(opening.spread) >= 1451  # what EXACTNESS is proven for
