"""The audit: it passes the real mechanism and finds every planted bug.

Seeds are fixed. All bounds of an audit hold simultaneously with 95 % confidence. Thresholds for
large bounds are three standard deviations below the mean, both from thirty audits of scores drawn
from the claimed distributions.
"""

from __future__ import annotations

import json
import math
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm
from support import Said, cli, split_keys

from pevdn.config import experiment as config
from pevdn.privacy.accounting import epsilon
from pevdn.simulation.program import Simulation
from pevdn.verification import audit, canary
from pevdn.verification.audit import PLANTED
from pevdn.verification.canary import Scores
from pevdn.worlds.base import AgentSpec

# Three equal agents compile in half the time of toy:coordination's unlike ones.
TEAM: Any = SimpleNamespace(name="made-up", agents=(AgentSpec(3, 2),) * 3, max_steps=2)
SETTINGS = {"buffer_size": 8, "expected_batch_size": 2}  # δ = 8^−1.1 = 0.1
TRIALS = 1000


@cache
def audited(*epsilons: float, plant: str | None = None) -> dict[str, Any]:
    return audit.audit(TEAM, epsilons, TRIALS, seed=1, plant=plant, scaled=SETTINGS)


def rows(document: dict[str, Any], observer: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["observer"] == observer]


# ---- the audit as a whole -------------------------------------------------------------------


def test_the_real_mechanism_is_not_refuted_at_any_epsilon_for_any_observer():
    """ε = 3 as well in `test_pevdn_audit_as_it_is_typed`, which is slow."""
    document = audited(1.0, 8.0)
    assert document["passed"] and audit.refuted(document) is None
    for row in document["rows"]:
        assert row["passed"] and row["epsilon_lower_bound"] < row["epsilon_claimed"]
    claimed = [row["epsilon_claimed"] for row in rows(document, "agent")]
    assert claimed == pytest.approx([1, 8], rel=0.01)
    assert document["updates"] == 8  # the exposure that the program counted by itself


def test_the_audit_has_teeth():
    """A quarter of ε = 8, and of the team's 3.9; of the team's 29, most of what trials can show."""
    document = audited(1.0, 8.0)
    first, last = rows(document, "team")
    for row in (rows(document, "agent")[-1], first):
        assert row["epsilon_lower_bound"] > row["epsilon_claimed"] / 4
    assert last["epsilon_lower_bound"] > 0.75 * document["largest_possible_bound"]


@pytest.mark.parametrize("plant", ["no-noise", "no-clipping", "hidden-rate"])
def test_a_broken_mechanism_is_exposed(plant: str):
    document = audited(1.0, plant=plant)
    (agent,) = rows(document, "agent")
    assert not agent["passed"] and not document["passed"]
    assert agent["epsilon_claimed"] == pytest.approx(1, rel=0.01)  # the claim is the honest one
    assert agent["epsilon_lower_bound"] > agent["epsilon_claimed"]
    assert "for the agent observer is false" in str(audit.refuted(document))


def test_a_team_claim_without_root_n_is_exposed_and_nothing_else_is():
    """The program is correct, so its scores are the same; only the claim is wrong."""
    document = audited(1.0, plant="no-root-n")
    (agent,), (team,) = rows(document, "agent"), rows(document, "team")
    assert agent["passed"] and not team["passed"] and document["delta"] == 8**-1.1
    assert team["epsilon_claimed"] == agent["epsilon_claimed"]
    assert "for the team observer is false" in str(audit.refuted(document))
    honest = audited(1.0, 8.0)["rows"]
    assert [team["auc"], agent["auc"]] == [honest[0]["auc"], honest[1]["auc"]]  # from the seed


def test_every_planted_bug_has_a_test():
    """Those of pe-vdn-d alone are in test_noised_audit.py."""
    here = [name for name, bug in PLANTED.items() if "pe-vdn-c" in bug.algorithms]
    assert here == ["no-noise", "no-clipping", "hidden-rate", "no-root-n"]
    honest = config.make("pe-vdn-c", settings={**audit.SMALL, **SETTINGS}).settings
    for name in here:
        assert PLANTED[name].about
        assert PLANTED[name].runs(honest, 3) or not PLANTED[name].all_agents


# ---- the attack -----------------------------------------------------------------------------


def test_the_canary_is_clipped_and_points_where_the_attacker_expects_at_every_update():
    """Without noise a score is known to the digit: it only counts how often the canary was sampled.

    k of T updates add the log-likelihood ratio at C, the others that at 0, for exactly C long and
    equally directed gradients. k is binomial: its mean over 1,000 trials within five standard
    errors of Tq.
    """
    sigma = audited(1.0, plant="no-noise")["rows"][0]["noise_multiplier"]
    claim, silent = (
        config.make("pe-vdn-c", settings={**audit.SMALL, **SETTINGS, "noise_multiplier": noise})
        for noise in (sigma, 0)
    )
    sim = canary.Watched(TEAM, silent)
    fresh = jax.jit(sim.start, compiler_options=audit.QUICK)(jnp.array([1]))
    exposure, with_it, without = audit._scores(sim, claim, fresh, 8, TRIALS, 1)
    assert exposure == 8
    q = 0.25
    for observer, agents in (("agent", 1), ("team", 3)):
        weight = agents / (2 * sigma**2)
        hit, miss = (math.log(1 - q + q * math.exp(sign * weight)) for sign in (1, -1))
        sampled = (getattr(with_it, observer) - 8 * miss) / (hit - miss)
        assert np.allclose(sampled, np.rint(sampled), atol=0.01)
        assert abs(sampled.mean() - 8 * q) < 5 * math.sqrt(8 * q * (1 - q) / TRIALS)
        assert np.allclose(getattr(without, observer), 8 * miss, atol=0.01)


def random_team(seed: int, simulation: Simulation, lanes: int) -> tuple[Any, ...]:
    """Learners (S, N, ...) with parameters drawn from a normal distribution."""
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(simulation.start, jnp.arange(lanes))

    def drawn(x: jax.ShapeDtypeStruct) -> np.ndarray:
        return rng.normal(size=x.shape).astype(x.dtype)

    learners: tuple[Any, ...] = jax.tree.map(drawn, shapes.learners)
    return learners


def believed(world: Any = TEAM, **settings: Any) -> Simulation:
    values = {**audit.SMALL, **SETTINGS, **settings}
    return canary.believed(world, config.make("pe-vdn-c", settings=values))


def test_the_canary_reaches_the_clip_norm_whatever_the_parameters():
    """Far enough that even a bound 1,000 times as large would be reached."""
    clip_norm = 1e3 * config.make("pe-vdn-c").settings.clip_norm
    attacker = believed(hidden_size=3, clip_norm=clip_norm)
    episode = canary.by_kind(attacker.team, canary.make_canary(TEAM, 0), 200)
    learners = random_team(0, attacker, 200)
    added = jax.jit(lambda learners: canary.added(attacker, learners, episode)[0])
    for size in (0.0, 0.1, 1.0, 10.0):
        norms = jnp.linalg.norm(added(jax.tree.map(lambda x, by=size: by * x, learners)), axis=-1)
        assert norms.shape == (200, 3) and np.allclose(norms, clip_norm, rtol=1e-3)


def test_the_observer_of_one_agent_uses_nothing_of_the_others():
    """Others' parameters, records and released gradients change the team's score alone."""
    specs = (AgentSpec(3, 2), AgentSpec(4, 3), AgentSpec(3, 2))
    attacker = believed(SimpleNamespace(name="made-up", agents=specs, max_steps=2), hidden_size=3)
    team = attacker.team

    def seen(seed: int) -> list[Any]:
        rng = np.random.default_rng(seed)
        learners = random_team(seed, attacker, 5)
        sizes = [canary.vectors(learner.params).shape for learner in learners]
        episode = canary.by_kind(team, canary.make_canary(attacker.world, seed), 5)
        return jax.tree.map(np.array, [learners, episode, [rng.normal(size=s) for s in sizes]])

    mine, theirs, mixed = seen(0), seen(1), seen(1)
    for own, other in zip(mine, mixed, strict=True):  # kind 0 holds agents 0 and 2, kind 1 agent 1
        for a, b in zip(jax.tree.leaves(own[0]), jax.tree.leaves(other[0]), strict=True):
            b[:, 0] = a[:, 0]
    score = jax.jit(lambda *known: canary.score(attacker, *known))
    before, after, all_else = score(*mine), score(*mixed), score(*theirs)
    assert np.array_equal(before.agent, after.agent)
    assert not np.any(np.isclose(before.team, after.team))
    assert not np.any(np.isclose(before.agent, all_else.agent))


@pytest.mark.parametrize(("agents", "q"), [(1, 1.0), (1, 0.25), (3, 0.25)])
def test_the_score_of_one_update_is_that_of_the_subsampled_gaussian(agents: int, q: float):
    """AUC (1 − q)/2 + q Φ(√N / σ√2), for 2 · 20,000 sums drawn by hand; five standard errors."""
    rng, n, sigma = np.random.default_rng(2), 20_000, 0.8
    claimed = config.make("pe-vdn-c", settings={"noise_multiplier": sigma}).settings
    v = rng.normal(size=20)
    v *= claimed.clip_norm / np.linalg.norm(v)

    def scores(sampled: np.ndarray) -> np.ndarray:
        noise = sigma * claimed.clip_norm * rng.normal(size=(n, agents, v.size))
        each = canary.evidence(
            jnp.asarray(sampled[:, None, None] * v + noise), v, sigma * claimed.clip_norm
        )
        return np.asarray(canary.log_likelihood_ratio(each.sum(-1), q))

    found = audit.area_under_curve(scores(rng.random(n) < q), scores(np.zeros(n)))
    expected = (1 - q) / 2 + q * norm.cdf(math.sqrt(agents / 2) / sigma)
    assert abs(found - expected) < 5 / math.sqrt(6 * n)


# ---- what no audit would notice --------------------------------------------------------------


def test_unlike_samples_are_learnt_from_in_full_and_divided_by_the_same_number():
    """Lanes with 2 and 8 equal episodes, all sampled, in a program with room for 3 at a time.

    Dividing by what was sampled would make the lanes equal, dropping what does not fit the second
    one smaller: the sums are 2C and 8C long, over an expected batch of 8.
    """
    settings = {"buffer_size": 8, "expected_batch_size": 8, "noise_multiplier": 0}
    sim = Simulation(TEAM, config.make("pe-vdn-c", settings={**audit.SMALL, **settings}))
    state = jax.jit(sim.start)(jnp.arange(2))
    (record,) = canary.by_kind(sim.team, canary.make_canary(TEAM, 0), 2)
    everywhere = jax.tree.map(
        lambda x, rows: jnp.broadcast_to(x[:, :, None], rows.shape), record, state.replays[0]
    )
    state = state._replace(replays=(everywhere,), episodes=jnp.array([2, 8]))
    with patch.object(sim, "part", 3):
        (released,), _ = jax.jit(sim.gradients)(state, split_keys(state.key, 4))
    squares = [np.square(x).reshape(2, 3, -1).sum(-1) for x in jax.tree.leaves(released)]
    expected = np.array([[2.0], [8.0]]) * sim.settings.clip_norm / 8
    assert np.allclose(np.sqrt(sum(squares)), expected, rtol=1e-3)


# ---- the bound ------------------------------------------------------------------------------


def test_the_lower_bound_is_wrong_no_more_often_than_it_says():
    """Randomised response of ε = 2, where nothing is lost: 100 bounds at 80 % confidence.

    At most 20 of them may be wrong on average; five standard deviations are 20 more.
    """
    rng, truth = np.random.default_rng(3), 2.0
    right = math.exp(truth) / (1 + math.exp(truth))
    bounds = [
        audit.lower_bound(
            (rng.random(200) < right).astype(float),
            (rng.random(200) >= right).astype(float),
            significance=0.2,
            delta=0.0,
            seed=0,
        )
        for _ in range(100)
    ]
    assert sum(bound > truth for bound in bounds) <= 20 + 20
    assert np.median(bounds) > truth / 2


def test_scores_that_say_nothing_bound_nothing():
    rng = np.random.default_rng(4)
    same = rng.normal(size=(2, TRIALS))
    assert audit.lower_bound(*same, significance=0.05, delta=0.01, seed=0) < 0.1
    assert audit.area_under_curve(*same) == pytest.approx(0.5, abs=0.05)


# ---- the command line -----------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch):
    """`pevdn audit` with made-up scores: trials with the canary are this much above the others."""

    def run(shift: float, *arguments: object) -> Said:
        def scores(sim: Simulation, claim: Any, fresh: Any, updates: int, trials: int, seed: int):
            rng = np.random.default_rng(seed)
            with_it, without = rng.normal(shift, 1, trials), rng.normal(0, 1, trials)
            return updates, Scores(with_it, with_it), Scores(without, without)

        monkeypatch.setattr(audit, "_scores", scores)
        small = ("--agents", 1, "--buffer-size", 8, "--batch-size", 2, "--trials", 500)
        return cli("audit", *small, *arguments)

    return run


def test_an_audit_prints_one_document_and_leaves_with_0(told):
    said = told(0.0, "--epsilon", 1, "--epsilon", 3, "--delta", 0.05, "--json")
    assert said.code == 0
    document = json.loads(said.out)
    assert document["passed"] is True
    assert (document["trials"], document["confidence"], document["delta"]) == (500, 0.95, 0.05)
    assert (document["agents"], document["plant"]) == (1, None)
    assert [row["observer"] for row in document["rows"]] == ["team", "agent"] * 2
    assert set(document["rows"][0]) == {
        "observer",
        "noise_multiplier",
        "opening_noise",
        "epsilon_claimed",
        "epsilon_lower_bound",
        "auc",
        "passed",
    }
    lines = said.err.splitlines()  # progress
    assert [line.split(" at ")[0] for line in lines] == [
        "ε team 1.00, agent 1.00",
        "ε team 2.99, agent 2.99",
    ]


def test_a_refuted_claim_is_printed_and_leaves_with_1_and_a_sentence(told):
    said = told(9.0, "--epsilon", 1, "--json")
    assert said.code == 1
    document = json.loads(said.out)
    assert document["passed"] is False and document["rows"][0]["passed"] is False
    assert said.sentence.startswith(
        "pevdn: the claim of ε = 1.00 for the team observer is false: ε is"
    )
    table = told(9.0, "--epsilon", 1, "--plant", "no-noise")
    assert table.code == 1 and "REFUTED" in table.out and table.sentence == said.sentence
    assert "95% confidence" in table.out and "agent (conditional)" in table.out


RECIPE = {"buffer_size": 256, "expected_batch_size": 16, "update_every": 4, "optimizer": "sgd"}


def recipe(**more: object) -> list[object]:
    return [w for name, value in (RECIPE | more).items() for w in ("--set", f"{name}={value}")]


def test_the_claim_of_a_recipe_is_that_of_its_noise_and_what_was_scaled_is_said(told):
    chosen = recipe(noise_multiplier=0.9, clip_norm=0.2, delta=0.01)
    said = told(0.0, *chosen, "--scale", "update_every=1", "--json")
    assert said.code == 0, said.err
    document = json.loads(said.out)
    team, agent = document["rows"]
    assert agent["noise_multiplier"] == team["noise_multiplier"] == 0.9
    assert agent["epsilon_claimed"] == epsilon(8, 0.25, 0.9, 0.01)
    assert document["delta"] == 0.01
    assert document["settings"]["clip_norm"] == 0.2
    assert document["settings"]["optimizer"] == "sgd"
    assert document["scaled"] == {
        "buffer_size": {"recipe": 256, "audited": 8},
        "expected_batch_size": {"recipe": 16, "audited": 2},
        "update_every": {"recipe": 4, "audited": 1},
        "parallel_episodes": {"recipe": 32, "audited": 1},
        "hidden_size": {"recipe": 32, "audited": 1},
    }
    table = " ".join(told(0.0, *chosen).out.split())
    assert "buffer_size 8 instead of 256" in table and "update_every" not in table


def test_a_preset_is_audited_whole_but_for_what_is_scaled(told):
    sizes = {"buffer_size": 64, "expected_batch_size": 2, "update_every": 4, "hidden_size": 2}
    scaled = [w for name, value in sizes.items() for w in ("--scale", f"{name}={value}")]
    said = told(0.0, "--preset", "team-8", *scaled, "--scale=parallel_episodes=4", "--json")
    assert said.code == 0, said.err
    document = json.loads(said.out)
    assert document["rows"][0]["noise_multiplier"] == 1.71
    assert document["settings"]["network"] == "entities" and document["delta"] == 2.5e-7
    assert document["scaled"]["buffer_size"] == {"recipe": 4096, "audited": 64}
    wrong = told(0.0, "--preset", "team-88")
    assert wrong.code == 2 and "unknown preset 'team-88'" in wrong.sentence


def test_a_recipe_is_trained_with_its_own_settings(monkeypatch: pytest.MonkeyPatch):
    """And as many trials at once as fit: here not all 200 of them."""
    monkeypatch.setattr(audit, "MEMORY", 50_000)
    shapes, attack = [], canary.attack

    def spy(sim: Any, claim: Any, fresh: Any, episode: Any, keys: Any, slots: Any) -> Any:
        shapes.append((keys.shape, sim.settings))
        return attack(sim, claim, fresh, episode, keys, slots)

    monkeypatch.setattr(canary, "attack", spy)
    chosen = {"noise_multiplier": 0.5, "buffer_size": 8, "expected_batch_size": 4}
    more = {"update_every": 2, "optimizer": "sgd", "clip_norm": 3.0, "parallel_episodes": 1}
    alone: Any = SimpleNamespace(name="made-up", agents=TEAM.agents[:1], max_steps=1)
    document = audit.audit(alone, trials=100, settings=chosen | more)
    assert document["passed"] and document["updates"] == 4
    assert document["scaled"] == {"hidden_size": {"recipe": 32, "audited": 1}}
    (((updates, lanes, _), used),) = shapes
    assert updates == 4 and lanes < 200 and lanes % 2 == 0
    assert {name: getattr(used, name) for name in chosen | more} == chosen | more


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trials", 5], "trials is 5, but must be at least 100."),
        (["--epsilon", 0], "epsilon is 0.0, but must be at least 0.01."),
        (["--epsilon", -3], "epsilon is -3.0, but must be at least 0.01."),
        (["--epsilon", "nan"], "epsilon is 'nan', but must be a number."),
        (
            ["--set", "noise_multiplier=1", "--epsilon", 1],
            "noise_multiplier is set and determines ε; leave out epsilon.",
        ),
        (["--set", "noise_multiplier=0"], "noise_multiplier is 0, which claims no ε to audit"),
        (["--scale", "buffersize=8"], "unknown setting 'buffersize'; did you mean 'buffer_size'?"),
        (["--delta", 0], "delta is 0, but must be above 0 and at most 0.5."),
        (["--delta", 1.5], "delta is 1.5, but must be above 0 and at most 0.5."),
        (["--delta", "nan"], "delta is nan, but must be above 0 and at most 0.5."),
        (
            ["--plant", "no-nois"],
            "unknown planted bug of pe-vdn-c 'no-nois'; did you mean 'no-noise'?",
        ),
        (["--plant", "small-share"], "unknown planted bug of pe-vdn-c 'small-share'"),
        (["--algorithm", "pe-vdn-b"], "unknown private algorithm 'pe-vdn-b'; did you mean"),
        (["--agents", 0], "agents is 0, but must be at least 1."),
        (["--batch-size", 64], "expected_batch_size is 64, but a buffer of buffer_size=32"),
        (["--seed", -1], "seed is -1, but must be at least 0."),
        (["--env", "toy:two-step", "--agents", 3], "agents is 3, but toy:two-step has a fixed"),
        (["--env", "toy:coordinatio"], "unknown world 'toy:coordinatio'; did you mean"),
    ],
)
def test_bad_input_gets_one_sentence_before_anything_is_computed(arguments, sentence):
    said = cli("audit", *arguments)
    assert (said.code, said.out) == (2, "")
    assert said.sentence.startswith(f"pevdn: {sentence}")


@pytest.mark.slow
@pytest.mark.parametrize("plant", [None, *PLANTED])
def test_pevdn_audit_as_it_is_typed(plant: str | None):
    """The defaults, from the command line to the exit code: a minute each, for another seed."""
    said = cli("audit", "--json", "--seed", 5, *(["--plant", plant] if plant else []))
    document = json.loads(said.out)
    assert document["passed"] is (plant is None)
    assert said.code == (0 if plant is None else 1)
    assert (document["trials"], document["updates"], document["agents"]) == (2000, 32, 3)
    if plant is None:
        agent = rows(document, "agent")
        assert [row["epsilon_claimed"] for row in agent] == pytest.approx([1, 3, 8], rel=0.01)
        assert agent[-1]["epsilon_lower_bound"] > agent[-1]["epsilon_claimed"] / 4
