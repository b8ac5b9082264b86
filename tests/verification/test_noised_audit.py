"""The audit of pe-vdn-d: a coalition of teammates attacks one agent's record.

Seeds are fixed. All bounds of an audit hold simultaneously with 95 % confidence.
"""

from __future__ import annotations

import json
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm
from support import cli

from pevdn.config import experiment as config
from pevdn.privacy.accounting import Steps, composed
from pevdn.verification import audit
from pevdn.verification.audit import PLANTED
from pevdn.verification.canary import Scores, Watched
from pevdn.worlds.base import AgentSpec

SETTINGS = {"buffer_size": 8, "expected_batch_size": 2}  # δ = 8^−1.1 = 0.1
TRIALS = 1000
NOISED = [name for name, bug in PLANTED.items() if bug.algorithms == ("pe-vdn-d",)]


def team(n: int = 3) -> Any:
    return SimpleNamespace(name="made-up", agents=(AgentSpec(3, 2),) * n, max_steps=2)


@cache
def audited(*epsilons: float, plant: str | None = None, n: int = 3, **settings: Any) -> Any:
    chosen = {**SETTINGS, **settings}
    targets = epsilons or None
    how: Any = {"seed": 1, "plant": plant, "scaled": chosen, "algorithm": "pe-vdn-d"}
    return audit.audit(team(n), targets, TRIALS, **how)


def rows(document: dict[str, Any], observer: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["observer"] == observer]


# ---- the audit as a whole -------------------------------------------------------------------


def test_the_record_is_protected_from_a_coalition_of_all_other_agents():
    document = audited(1.0, 3.0)
    assert document["passed"] and audit.refuted(document) is None
    assert (document["algorithm"], document["colluders"], document["updates"]) == ("pe-vdn-d", 2, 8)
    observers = [row["observer"] for row in document["rows"]]
    assert observers == ["record", "team", "agent", "sums"] * 2
    for row in document["rows"]:
        assert row["passed"] and row["epsilon_lower_bound"] < row["epsilon_claimed"]
    claimed = [row["epsilon_claimed"] for row in rows(document, "record")]
    assert claimed == pytest.approx([1, 3], rel=0.01)


def test_the_audit_of_a_record_has_teeth():
    """Four fifths of the ε of the sums, 10,000 trials of each kind; two fifths of all of it."""
    document = audited(1.0, 3.0)
    first, last = rows(document, "sums")
    assert last["epsilon_lower_bound"] > 0.8 * last["epsilon_claimed"]
    assert first["epsilon_lower_bound"] > 0.5 * first["epsilon_claimed"]
    assert rows(document, "record")[-1]["epsilon_lower_bound"] > 0.4 * 3


def test_a_smaller_coalition_is_audited_with_what_it_knows():
    """t = 1 of three: the honest agents' noise adds up, and their messages are known."""
    document = audited(3.0, colluders=1)
    assert document["passed"] and document["colluders"] == 1
    (sums,) = rows(document, "sums")
    assert sums["epsilon_lower_bound"] > 0.8 * sums["epsilon_claimed"]


def test_the_claim_of_a_record_is_the_composition_of_updates_and_openings():
    chosen = {"noise_multiplier": 0.9, "opening_noise": 0.8, "openings": 2}
    (record, _, _, sums) = no_updates(**chosen)["rows"]
    steps = [(8, 0.25, 0.9), (2, 1.0, 0.8)]
    claimed = composed([Steps(*one) for one in steps], 8**-1.1)
    assert record["epsilon_claimed"] == pytest.approx(claimed, rel=1e-9)
    claimed = composed([Steps(*steps[1])], 8**-1.1)
    assert sums["epsilon_claimed"] == pytest.approx(claimed, rel=1e-9)
    assert (record["noise_multiplier"], record["opening_noise"]) == (0.9, 0.8)


# ---- planted bugs ---------------------------------------------------------------------------


def no_updates(plant: str | None = None, **settings: Any) -> Any:
    """An audit of the sums alone: the other trials are replaced by scores that say nothing."""

    def silent(sim: Any, claim: Any, fresh: Any, updates: int, trials: int, seed: int) -> Any:
        nothing = Scores(*np.zeros((3, trials)))
        return updates, nothing, nothing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "_scores", silent)
        return audited.__wrapped__(*([] if settings else [1.0]), plant=plant, **settings)


def test_every_planted_bug_of_an_opening_has_a_test():
    assert NOISED == [
        "no-opening-noise",
        "small-share",
        "no-message-clip",
        "opened-twice",
        "private-centre",
    ]


@pytest.mark.parametrize("plant", [None, *NOISED])
def test_a_broken_opening_is_exposed(plant: str | None):
    document = no_updates(plant)
    (sums,) = rows(document, "sums")
    assert document["passed"] is sums["passed"] is (plant is None)
    honest = rows(audited(1.0, 3.0), "sums")[0]
    assert sums["epsilon_claimed"] == honest["epsilon_claimed"]  # the claim is the honest one
    if plant is not None:
        assert sums["epsilon_lower_bound"] > sums["epsilon_claimed"]
        assert "for the sums observer is false" in str(audit.refuted(document))


@pytest.mark.parametrize("n", [2, 5])
def test_a_share_of_noise_for_fewer_colluders_is_exposed_in_teams_of_other_sizes(n: int):
    honest, broken = (
        no_updates(plant, n=n, noise_multiplier=1.0, opening_noise=1.0)
        for plant in (None, "small-share")
    )
    assert honest["passed"] and not broken["passed"]


def test_a_whole_audit_exposes_what_leaks_through_the_sums():
    document = audited(1.0, plant="private-centre")
    (record,), (team,) = rows(document, "record"), rows(document, "team")
    assert not record["passed"] and team["passed"]  # an outsider sees no sums
    assert record["epsilon_lower_bound"] > 3 * record["epsilon_claimed"]


def test_a_team_claim_for_one_agents_updates_is_exposed():
    """With coins of their own, N agents make N·E updates."""
    document = audited(1.0, plant="no-root-n")
    (team,) = rows(document, "team")
    assert not team["passed"] and rows(document, "record")[0]["passed"]


# ---- the attack -----------------------------------------------------------------------------


def test_the_score_of_an_opening_is_that_of_the_gaussian_mechanism():
    """AUC Φ(√n / (√2 s/M)) for n openings, which takes the whole clip norm and all the noise.

    5,000 trials of each kind: five standard errors, which are at most √(1/(6 · 5,000)).
    """
    chosen = {**audit.SMALL, **SETTINGS, "opening_noise": 1.3, "openings": 2, "colluders": 1}
    made = config.make("pe-vdn-d", settings=chosen)
    sim = Watched(team(), made)
    fresh = jax.jit(sim.start)(jnp.array([1]))
    with_it, without = audit._sums(sim, made, fresh, 500, 1)
    found = audit.area_under_curve(with_it, without)
    assert abs(found - norm.cdf(math.sqrt(2) / (math.sqrt(2) * 1.3))) < 5 / math.sqrt(6 * 5000)
    # A log-likelihood ratio has mean μ²/2 with the canary and −μ²/2 without, and variance μ².
    mu = math.sqrt(2) / 1.3
    assert with_it.mean() == pytest.approx(mu**2 / 2, abs=5 * mu / math.sqrt(5000))
    assert without.mean() == pytest.approx(-(mu**2) / 2, abs=5 * mu / math.sqrt(5000))


def test_without_noise_the_record_of_the_last_agent_is_read_off_the_sum():
    """Whatever the others sent: the coalition's words and the honest ones' messages cancel."""
    chosen = {**audit.SMALL, **SETTINGS, "opening_noise": 0.0, "colluders": 1}
    silent, claim = (
        config.make("pe-vdn-d", settings={**chosen, "opening_noise": noise}) for noise in (0, 0.7)
    )
    sim = Watched(team(4), silent)
    fresh = jax.jit(sim.start)(jnp.array([2]))
    with_it, without = audit._sums(sim, claim, fresh, 100, 1)
    assert np.allclose(with_it, 0.5 / 0.7**2, rtol=2e-3)
    assert np.allclose(without, -0.5 / 0.7**2, rtol=2e-3)


# ---- the command line -----------------------------------------------------------------------


def test_the_command_audits_pe_vdn_d_and_says_who_attacks(monkeypatch: pytest.MonkeyPatch):
    def scores(sim: Any, claim: Any, fresh: Any, updates: int, trials: int, seed: int) -> Any:
        nothing = Scores(*np.zeros((3, trials)))
        return updates, nothing, nothing

    def sums(sim: Any, claim: Any, fresh: Any, trials: int, seed: int) -> Any:
        return np.zeros(trials), np.zeros(trials)

    monkeypatch.setattr(audit, "_scores", scores)
    monkeypatch.setattr(audit, "_sums", sums)
    small = ("--agents", 2, "--buffer-size", 8, "--batch-size", 2, "--trials", 100)
    said = cli("audit", "--algorithm", "pe-vdn-d", "--epsilon", 2, *small)
    assert said.code == 0, said.err
    assert "sums alone" in said.out and "1 of the other agents" in said.out
    document = json.loads(cli("audit", "--algorithm", "pe-vdn-d", *small, "--json").out)
    assert [row["observer"] for row in document["rows"]] == ["record", "team", "agent", "sums"] * 3
    wrong = cli("audit", "--algorithm", "pe-vdn-d", *small, "--plant", "no-share")
    assert wrong.code == 2 and "unknown planted bug of pe-vdn-d 'no-share'" in wrong.sentence
    none = cli("audit", "--algorithm", "pe-vdn-d", *small, "--set", "opening_noise=0")
    assert none.code == 0  # the noise is found for the default ε
    set_both = ("--set", "opening_noise=0", "--set", "noise_multiplier=1")
    none = cli("audit", "--algorithm", "pe-vdn-d", *small, *set_both)
    assert none.code == 2 and "opening_noise is 0, which claims no ε to audit" in none.sentence


@pytest.mark.slow
@pytest.mark.parametrize("plant", [None, *NOISED, "no-noise", "no-clipping", "hidden-rate"])
def test_pevdn_audit_of_pe_vdn_d_as_it_is_typed(plant: str | None):
    """The defaults, from the command line to the exit code, for another seed."""
    words = ["audit", "--algorithm", "pe-vdn-d", "--json", "--seed", 5]
    said = cli(*words, *(["--plant", plant] if plant else []))
    document = json.loads(said.out)
    assert document["passed"] is (plant is None)
    assert said.code == (0 if plant is None else 1)
