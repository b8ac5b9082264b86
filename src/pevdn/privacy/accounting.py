"""How much privacy a run has spent so far.

An episode can only be learnt from while it is in the buffer. Its *exposure* is the number of
updates made in that time, counted by the program as they happen, and its loss composes exactly
that many Poisson-subsampled Gaussian steps at rate q = expected batch / buffer size. Whether an
update happened is public, so nothing is gained from the coin that decided it: the exposure
already is what the coin left over.

Two figures, always together (docs/privacy.md has the argument and its limits):

- `team`: an observer of all N agents. One episode is in every agent's gradient, so the joint
  sensitivity is √N · C. By post-processing it also bounds what any outsider learns who sees less
  than all agents.
- `agent`: the loss through one agent's own gradients, with sensitivity C, *given* what its
  teammates contribute. Teammates learn from the episode too and feed it back through the team
  error; against an observer of one agent who may exploit that, only `team` is proven.

Neither says anything about a teammate, who sees the opened sums.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple


class Spent(NamedTuple):
    """ε for both figures at the same δ; infinite without noise."""

    epsilon_agent: float
    epsilon_team: float
    delta: float


def spent(
    exposure: int, sampling_rate: float, noise_multiplier: float, delta: float, n_agents: int
) -> Spent:
    """What the most exposed episode has lost after `exposure` updates."""
    return Spent(
        epsilon(exposure, sampling_rate, noise_multiplier, delta),
        epsilon(exposure, sampling_rate, noise_multiplier / math.sqrt(n_agents), delta),
        delta,
    )


@lru_cache(maxsize=4096)
def epsilon(updates: int, sampling_rate: float, noise_multiplier: float, delta: float) -> float:
    """ε(δ) of `updates` Poisson-subsampled Gaussians, by privacy loss distributions.

    Neighbours differ in one episode of the team, which is empty in one of them. For one update
    that is the same pair of distributions as adding or removing a record of a fixed data set,
    which is how dp-accounting calls it.
    """
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    if updates == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    step = dp.PoissonSampledDpEvent(sampling_rate, dp.GaussianDpEvent(noise_multiplier))
    # The grid rounds losses up, so a coarser one can only overstate ε (here by less than 0.001).
    accountant = PLDAccountant(
        dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=5e-4
    )
    return float(accountant.compose(step, updates).get_epsilon(delta))
