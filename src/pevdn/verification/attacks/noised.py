"""Attack noised openings (pe-vdn-d): what one teammate, or all together, learn from the sums.

The team is the attacked run's, whatever its algorithm: its agents compute what they would enter
into an opening at each ε, for teams of several sizes. The noise is the least that keeps all n
openings of a record within ε, if no update spent anything: what a run of this ε at least has.

- A *teammate* infers private features from the sum less its own part, as in `teammate`, of which
  this is the noised counterpart. In a team of two it is the coalition of all other agents.
- A *coalition* of all other agents infers whether the victim's record is in the sum or empty. It
  knows the record, all other messages and its own noise: the sum less all of that is the victim's
  clipped message, or nothing, plus the victim's noise. Its score is the log-likelihood ratio.

No attack has a larger AUC than `largest_auc` of the (ε, δ) that hold. For a feature these are of
replacing one record by another, for membership of emptying it.

Shapes: E episodes, T steps, N agents.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pevdn.config.experiment import Config
from pevdn.privacy import accounting, planner
from pevdn.privacy.mechanism import NoisedOpening
from pevdn.verification.attacks import teammate
from pevdn.verification.attacks.membership import DELTAS, noise_for
from pevdn.verification.attacks.statistics import Estimate, Floats, estimate, largest_auc
from pevdn.verification.attacks.teammate import ATTACKER, TEAM_SIZES, VICTIM, Transcript

EPSILONS = (math.inf, 16.0, 8.0, 2.9)  # of one record, from the sums alone


class Way(NamedTuple):
    """One noised opening that is attacked."""

    opening: NoisedOpening
    epsilon: float  # of the openings of one record, by themselves
    own: bool = False  # of the attacked run

    @property
    def agents(self) -> int:
        return self.opening.n_agents

    def largest_auc(self, relation: str) -> float:
        """Return the largest AUC of any test of what is opened of one record."""
        if not self.opening.opening_noise:
            return 1.0
        n, noise = self.opening.openings, self.opening.opening_noise
        return largest_auc((accounting.epsilon(n, 1.0, noise, d, relation), d) for d in DELTAS)


def ways(config: Config, agents: int) -> list[Way]:
    """Return the openings to attack: every ε in teams of every size, and a pe-vdn-d run's own."""
    s = config.settings
    noises = [(e, noise_for(e, s.openings, 1.0, config.delta)) for e in EPSILONS]
    found = [
        Way(NoisedOpening.of(dataclasses.replace(s, opening_noise=noise, colluders=0), size), e)
        for size in TEAM_SIZES
        for e, noise in noises
    ]
    if config.noised and s.opening_noise:
        spent = planner.Plan.of(config, agents).mechanism.epsilon(0, "record")
        found.append(Way(NoisedOpening.of(s, agents), spent, own=True))
    return found


class NoisedReading(NamedTuple):
    """The result of one attack on noised sums; `feature` is None for membership of the record."""

    feature: str | None
    agents: int
    epsilon: float
    opening_noise: float
    own: bool
    largest_auc: float
    estimate: Estimate | None


def attack(
    transcript: Transcript, which: Sequence[Way], seed: int
) -> tuple[list[NoisedReading], list[NoisedReading]]:
    """Return what a teammate infers of features, and a coalition of the presence of a record.

    `transcript.offers` are what the agents entered into each of the openings.
    """
    half = teammate.halves(transcript.running.shape[0], np.random.default_rng(seed))
    answers = {name: teammate.inner(answer) for name, answer in transcript.answers.items()}
    silent = {way.agents: x for way, x in _pairs(which, transcript) if way.epsilon == math.inf}
    features, records = [], []
    for number, (way, offers) in enumerate(_pairs(which, transcript)):
        if way.own:  # the run's own team
            received = teammate.around(offers.sum(0) - offers[ATTACKER])
            possible = teammate.usable(transcript.running)
        else:
            generator = np.random.default_rng(seed + number)
            most = max(TEAM_SIZES)
            sums, possible = teammate.composed(offers, transcript.running, half, most, generator)
            received = sums[way.agents]
        where = teammate.usable(transcript.present) & possible
        found = teammate.read(received, answers, where, half, seed)
        about = (way.agents, way.epsilon, way.opening.opening_noise, way.own)
        allowed = way.largest_auc("replace-one")
        features += [NoisedReading(name, *about, allowed, x) for name, x in found.items()]
        if way.agents in silent:
            result = infer_presence(offers[VICTIM], silent[way.agents][VICTIM], way, seed)
            records.append(NoisedReading(None, *about, way.largest_auc("zero-out"), result))
    return features, records


def _pairs(which: Sequence[Way], transcript: Transcript) -> list[tuple[Way, Floats]]:
    return list(zip(which, transcript.offers, strict=True))


def infer_presence(offered: Floats, clipped: Floats, way: Way, seed: int) -> Estimate:
    """Estimate how well a coalition tells records (E, T) in the sum from empty ones.

    A fair coin empties each record. `offered` is the clipped message with noise, `clipped` without.
    """
    present = np.random.default_rng(seed).random(len(offered)) < 0.5
    seen = np.where(present[:, None], offered, offered - clipped)
    scores = np.sum((seen - clipped / 2) * clipped, axis=1)  # log-likelihood ratio, times s²
    if not way.opening.opening_noise:
        scores = np.sign(scores)
    return estimate(scores, present, np.arange(len(present)))
