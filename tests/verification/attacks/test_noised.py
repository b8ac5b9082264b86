"""Attacks on noised sums: they work without noise, and end where (ε, δ) says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from scipy.stats import norm

from pevdn.config import experiment as config
from pevdn.privacy.accounting import epsilon
from pevdn.privacy.mechanism import NoisedOpening
from pevdn.verification.attacks import noised, teammate
from pevdn.verification.attacks.noised import Way
from pevdn.verification.attacks.target import Target

DELTA = 1e-3


def way(agents: int = 2, noise: float = 0.0) -> Way:
    made = config.make("pe-vdn-d", settings={"message_norm": 0.5, "opening_noise": noise}).settings
    spent = epsilon(1, 1.0, noise, DELTA) if noise else math.inf
    return Way(NoisedOpening.of(made, agents), spent)


WAYS = [way(2), way(2, 0.5), way(2, 5.0), way(8), way(8, 5.0)]


@pytest.fixture(scope="module")
def transcript(target: Target) -> teammate.Transcript:
    target.openings = [one.opening for one in WAYS]
    keys = jax.random.split(jax.random.key(0), 1024)
    target._play = jax.jit(target._played)
    found = teammate.transcribe(
        target.play(keys), teammate.private_features(target.simulation.world)
    )
    target.openings = ()
    target._play = jax.jit(target._played)
    return found


# ---- what is attacked -----------------------------------------------------------------------


def test_what_is_attacked_is_the_clipped_share_of_the_team_error_with_noise(
    target: Target, transcript: teammate.Transcript
) -> None:
    """Without noise m + r/N, clipped to M; with it, noise of deviation s (five standard errors)."""
    silent, quiet = transcript.offers[0], transcript.offers[1]
    norms = np.linalg.norm(silent, axis=-1)
    assert norms.max() <= 0.5 and norms.max() > 0.499
    noise = (quiet - silent).ravel()
    assert abs(noise.std() / (0.5 * 0.5) - 1) < 5 / math.sqrt(2 * noise.size)
    (scene,) = target.play(jax.random.split(jax.random.key(0), 1024)[:128])
    shares = scene.messages + np.stack([e.rewards for e in scene.episodes]) / 2
    shares = shares * np.minimum(1, 0.5 / np.linalg.norm(shares, axis=-1, keepdims=True))
    assert np.allclose(silent[:, :128], shares, atol=2e-3)


@pytest.mark.parametrize("algorithm", ["pe-vdn-b", "pe-vdn-d"])
def test_every_epsilon_is_attacked_in_teams_of_every_size_and_a_runs_own_noise(algorithm: str):
    made = config.make(algorithm, steps=1000, settings={"opening_noise": 0.9})
    found = noised.ways(made, 3)
    own = [x for x in found if x.own]
    assert [(x.agents, x.epsilon) for x in found if not x.own] == [
        (n, e) for n in teammate.TEAM_SIZES for e in noised.EPSILONS
    ]
    for one in found:
        noise = one.opening.opening_noise
        assert one.opening.colluders == one.agents - 1
        if math.isfinite(one.epsilon):
            assert epsilon(1, 1.0, noise, made.delta) <= one.epsilon * (1 + 1e-9)
            assert one.own or epsilon(1, 1.0, noise - 2e-3, made.delta) > one.epsilon
        else:
            assert noise == 0
    assert [x.opening.opening_noise for x in own] == ([0.9] if algorithm == "pe-vdn-d" else [])


# ---- what ε allows --------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_the_largest_auc_is_the_area_under_the_gaussian_trade_off_curve(noise: float) -> None:
    """Φ(μ/√2) with μ = M/s for an empty record, 2M/s for another one; never below."""
    for relation, mu in (("zero-out", 1 / noise), ("replace-one", 2 / noise)):
        exact = norm.cdf(mu / math.sqrt(2))
        allowed = way(2, noise).largest_auc(relation)
        assert exact <= allowed <= exact + 0.02
    assert way(2, 0.0).largest_auc("zero-out") == 1


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_a_coalition_that_knows_a_record_reaches_what_epsilon_allows_and_no_more(noise: float):
    """Records of norm M: AUC Φ(M/(√2 s)), within its own interval."""
    rng = np.random.default_rng(0)
    clipped = rng.normal(size=(4000, 20))
    clipped *= 0.5 / np.linalg.norm(clipped, axis=1, keepdims=True)
    offered = clipped + rng.normal(0, 0.5 * noise, clipped.shape)
    found = noised.infer_presence(offered, clipped, way(2, noise), 0)
    assert found.low < norm.cdf(1 / (math.sqrt(2) * noise)) < found.high
    assert found.low < way(2, noise).largest_auc("zero-out")
    silent = noised.infer_presence(clipped, clipped, way(2), 0)
    assert silent.auc == 1


def test_a_record_that_says_nothing_cannot_be_found() -> None:
    noise = np.random.default_rng(1).normal(size=(1000, 5))
    found = noised.infer_presence(noise, np.zeros_like(noise), way(2, 1.0), 0)
    assert found.auc == 0.5


# ---- the attack -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readings(transcript: teammate.Transcript) -> Any:
    return noised.attack(transcript, WAYS, 0)


def test_a_teammate_reads_a_private_feature_off_a_sum_without_noise_and_not_off_a_noised_one(
    readings: Any,
) -> None:
    cue = [x for x in readings[0] if x.feature == "cue"]
    silent, quiet, loud, silent_of_8, loud_of_8 = cue
    assert silent.estimate.auc > 0.95 and silent.largest_auc == 1
    assert silent.estimate.auc > quiet.estimate.auc > loud.estimate.auc
    assert loud.estimate.low < 0.6 and loud.largest_auc < 0.65
    assert silent_of_8.estimate.auc < silent.estimate.auc
    assert loud_of_8.estimate.contains_chance
    for reading in cue:
        assert reading.estimate.low <= reading.largest_auc


def test_presence_is_certain_without_noise_and_bounded_with_it(readings: Any) -> None:
    _, records = readings
    assert [x.agents for x in records] == [2, 2, 2, 8, 8]
    assert [x.estimate.auc for x in records if x.epsilon == math.inf] == [1, 1]
    for record in records:
        assert record.feature is None and record.estimate.low <= record.largest_auc
    assert records[1].estimate.auc > 0.75  # the attack has teeth: ε allows 0.92
    assert records[2].estimate.auc < 0.62


def test_noise_that_is_forgotten_would_be_seen(transcript: teammate.Transcript) -> None:
    """The same attack, where what was entered lacks the noise that ε was computed for."""
    offers = transcript.offers
    forgotten = transcript._replace(offers=(offers[0], offers[0]))
    features, records = noised.attack(forgotten, [WAYS[0], WAYS[2]], 0)
    broken = next(x for x in features if x.feature == "cue" and x.epsilon < math.inf)
    assert broken.estimate.low > broken.largest_auc
    assert records[1].estimate.low > records[1].largest_auc


def test_a_runs_own_openings_are_attacked_in_its_own_team(target: Target) -> None:
    """The sum less the attacker's part, in the team that played: no composition."""
    own = dataclasses.replace(WAYS[0].opening)
    target.openings, target._play = [own], jax.jit(target._played)
    keys = jax.random.split(jax.random.key(2), 256)
    found = teammate.transcribe(
        target.play(keys), teammate.private_features(target.simulation.world)
    )
    target.openings, target._play = (), jax.jit(target._played)
    features, records = noised.attack(found, [Way(own, 5.0, own=True)], 0)
    assert all(x.own and x.agents == 2 for x in features) and records == []
    cue = next(x for x in features if x.feature == "cue")
    assert cue.estimate is not None and cue.estimate.auc > 0.9
