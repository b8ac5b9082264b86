"""The audit: it leaves the real mechanism alone, and finds every planted mistake.

Seeds are fixed. All bounds of an audit hold at once but for a chance of 5 %. That a bound is large
enough is asserted three of its standard deviations below its mean, both from thirty audits of
numbers drawn by hand from the claimed distributions.
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
from support import Said, cli

from pevdn.agent import network
from pevdn.experiment import config
from pevdn.privacy import audit
from pevdn.privacy.audit import PLANTED, Scores
from pevdn.runtime.simulation import Simulation, split_keys
from pevdn.runtime.team import Team
from pevdn.worlds.base import AgentSpec

# Three equal agents compile in half the time of toy:coordination's unlike ones.
TEAM: Any = SimpleNamespace(name="made-up", agents=(AgentSpec(3, 2),) * 3, max_steps=2)
SETTINGS = {"buffer_size": 8, "expected_batch_size": 2}  # δ = 0.1 by the rule of training
TRIALS = 1000


@cache
def audited(*epsilons: float, plant: str | None = None) -> dict[str, Any]:
    return audit.audit(TEAM, epsilons, TRIALS, seed=1, plant=plant, **SETTINGS)


def rows(document: dict[str, Any], view: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["view"] == view]


# ---- the audit as a whole -------------------------------------------------------------------


def test_the_real_mechanism_is_not_refuted_at_any_epsilon_in_any_view():
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
    assert "in the agent view is false" in str(audit.refuted(document))


def test_a_team_view_without_root_n_is_exposed_and_nothing_else_is():
    """The program is as it should be, so what is seen of it is the same; only the claim is not."""
    document = audited(1.0, plant="no-root-n")
    (agent,), (team,) = rows(document, "agent"), rows(document, "team")
    assert agent["passed"] and not team["passed"]
    assert team["epsilon_claimed"] == agent["epsilon_claimed"]
    assert "in the team view is false" in str(audit.refuted(document))
    honest = audited(1.0, 8.0)["rows"]
    assert [agent["auc"], team["auc"]] == [honest[0]["auc"], honest[1]["auc"]]  # from the seed


def test_every_planted_bug_has_a_test():
    assert list(PLANTED) == ["no-noise", "no-clipping", "hidden-rate", "no-root-n"]
    honest = config.make("pe-vdn-c", settings=SETTINGS).settings
    for bug in PLANTED.values():
        assert bug.about and (bug.runs(honest) or not bug.root_n)


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
    sim = audit.Watched(TEAM, silent)
    fresh = jax.jit(sim.start, compiler_options=audit.QUICK)(jnp.array([1]))
    exposure, with_it, without = audit._scores(sim, claim, fresh, 8, TRIALS, 1)
    assert exposure == 8
    q = 0.25
    for view, agents in (("agent", 1), ("team", 3)):
        weight = agents / (2 * sigma**2)
        hit, miss = (math.log(1 - q + q * math.exp(sign * weight)) for sign in (1, -1))
        sampled = (getattr(with_it, view) - 8 * miss) / (hit - miss)
        assert np.allclose(sampled, np.rint(sampled), atol=0.01)
        assert abs(sampled.mean() - 8 * q) < 5 * math.sqrt(8 * q * (1 - q) / TRIALS)
        assert np.allclose(getattr(without, view), 8 * miss, atol=0.01)


def random_parameters(rng: np.random.Generator, spec: AgentSpec, *copies: int) -> Any:
    sizes = (spec.observation_size, spec.n_actions, 3)
    shapes = jax.eval_shape(lambda: network.initialise(jax.random.key(0), *sizes))
    return jax.tree.map(lambda x: rng.normal(size=(*copies, *x.shape)).astype(x.dtype), shapes)


def test_the_canary_reaches_the_clip_norm_whatever_the_parameters():
    """Far enough that even a bound 1,000 times as large would be reached."""
    spec = TEAM.agents[0]
    canary = audit.make_canary(TEAM, 0)[0]
    thetas = random_parameters(np.random.default_rng(0), spec, 500)
    raw = jax.jit(jax.vmap(lambda theta: audit.canary_gradient(theta, canary)))
    for size in (0.0, 0.1, 1.0, 10.0):
        norms = jnp.linalg.norm(raw(jax.tree.map(lambda x, by=size: by * x, thetas)), axis=1)
        assert float(norms.min()) > 1e3 * config.make("pe-vdn-c").settings.clip_norm


def test_the_observer_of_one_agent_uses_nothing_of_the_others():
    """Others' parameters, records and released gradients change the team's score alone."""
    team = Team.of((AgentSpec(3, 2), AgentSpec(4, 3), AgentSpec(3, 2)))
    world: Any = SimpleNamespace(agents=[team.kinds[k].spec for k in (0, 1, 0)], max_steps=2)
    claim = config.make("pe-vdn-c", settings=SETTINGS)

    def seen(seed: int) -> list[Any]:
        rng = np.random.default_rng(seed)
        params = [random_parameters(rng, k.spec, 5, len(k.members)) for k in team.kinds]
        sizes = [sum(x[0, 0].size for x in p) for p in params]
        released = [
            rng.normal(size=(5, len(k.members), size))
            for k, size in zip(team.kinds, sizes, strict=True)
        ]
        canary = audit.by_kind(team, audit.make_canary(world, seed), 5)
        return jax.tree.map(np.array, [params, canary, released])

    mine, theirs, mixed = seen(0), seen(1), seen(1)
    for own, other in zip(mine, mixed, strict=True):  # kind 0 holds agents 0 and 2, kind 1 agent 1
        for a, b in zip(jax.tree.leaves(own[0]), jax.tree.leaves(other[0]), strict=True):
            b[:, 0] = a[:, 0]
    score = jax.jit(lambda *known: audit.score(team, *known, claim))
    before, after, all_else = score(*mine), score(*mixed), score(*theirs)
    assert np.array_equal(before.agent, after.agent)
    assert not np.any(np.isclose(before.team, after.team))
    assert not np.any(np.isclose(before.agent, all_else.agent))


@pytest.mark.parametrize(("agents", "q"), [(1, 1.0), (1, 0.25), (3, 0.25)])
def test_the_score_of_one_update_is_that_of_the_subsampled_gaussian(agents: int, q: float):
    """AUC (1 − q)/2 + q Φ(√N / σ√2), for 2 · 20,000 sums drawn by hand; five standard errors."""
    rng, n, sigma = np.random.default_rng(2), 20_000, 0.8
    settings = {"buffer_size": 8, "expected_batch_size": round(8 * q), "noise_multiplier": sigma}
    claim = config.make("pe-vdn-c", settings={**audit.SMALL, **settings})
    clip_norm = claim.settings.clip_norm
    spec, canary = TEAM.agents[0], audit.make_canary(TEAM, 0)[0]
    theta = random_parameters(rng, spec)
    raw = np.asarray(audit.canary_gradient(theta, canary))
    v = clip_norm * raw / np.linalg.norm(raw)

    @jax.jit
    @jax.vmap
    def score(sums: jax.Array) -> jax.Array:
        each = jax.vmap(lambda s: audit.evidence(theta, canary, s, claim.settings))(sums)
        return audit.log_likelihood_ratio(each.sum(), claim.sampling_rate)

    def scores(sampled: np.ndarray) -> np.ndarray:
        noise = sigma * clip_norm * rng.normal(size=(n, agents, v.size))
        sums = jnp.asarray(sampled[:, None, None] * v + noise)
        return np.asarray(score(sums))

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
    (record,) = audit.by_kind(sim.team, audit.make_canary(TEAM, 0), 2)
    everywhere = jax.tree.map(
        lambda x, rows: jnp.broadcast_to(x[:, :, None], rows.shape), record, state.replays[0]
    )
    state = state._replace(replays=(everywhere,), episodes=jnp.array([2, 8]))
    with patch("pevdn.runtime.simulation.PART", 3):
        (released,), _ = jax.jit(sim._gradients)(state, split_keys(state.key, 4))
    squares = [np.square(x).reshape(2, 3, -1).sum(-1) for x in released]
    expected = np.array([[2.0], [8.0]]) * sim.settings.clip_norm / 8
    assert np.allclose(np.sqrt(sum(squares)), expected, rtol=1e-4)


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
    assert [row["view"] for row in document["rows"]] == ["agent", "team"] * 2
    assert set(document["rows"][0]) == {
        "view",
        "noise_multiplier",
        "epsilon_claimed",
        "epsilon_lower_bound",
        "auc",
        "passed",
    }
    lines = said.err.splitlines()  # progress
    assert [line.split(" at ")[0] for line in lines] == ["ε 1", "ε 3"]


def test_a_refuted_claim_is_printed_and_leaves_with_1_and_a_sentence(told):
    said = told(9.0, "--epsilon", 1, "--json")
    assert said.code == 1
    document = json.loads(said.out)
    assert document["passed"] is False and document["rows"][0]["passed"] is False
    assert said.sentence.startswith("pevdn: the claim of ε = 1.00 in the agent view is false: ε is")
    table = told(9.0, "--epsilon", 1, "--plant", "no-noise")
    assert table.code == 1 and "REFUTED" in table.out and table.sentence == said.sentence
    assert "95% confidence" in table.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trials", 5], "trials is 5, but must be at least 100."),
        (["--epsilon", 0], "epsilon is 0.0, but must be at least 0.01."),
        (["--epsilon", -3], "epsilon is -3.0, but must be at least 0.01."),
        (["--epsilon", "nan"], "epsilon is 'nan', but must be a number."),
        (["--delta", 0], "delta is 0, but must be above 0 and at most 0.5."),
        (["--delta", 1.5], "delta is 1.5, but must be above 0 and at most 0.5."),
        (["--delta", "nan"], "delta is nan, but must be above 0 and at most 0.5."),
        (["--plant", "no-nois"], "unknown planted bug 'no-nois'; did you mean 'no-noise'?"),
        (["--agents", 0], "agents is 0, but must be at least 1."),
        (["--batch-size", 64], "expected_batch_size is 64, but a buffer of buffer_size=32"),
        (["--seed", -1], "seed is -1, but must be at least 0."),
        (["--env", "toy:two-step", "--agents", 3], "agents is 3, but toy:two-step has its own"),
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
