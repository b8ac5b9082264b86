"""Compute the privacy loss of a run, and state which observer it holds against.

Updates can use an episode only while it is in the buffer. Its *exposure* is the number of updates
made in that time, counted by the program as they happen. Its privacy loss is the composition of
exactly that many Poisson-subsampled Gaussian mechanisms at rate q = expected batch / buffer size.
Whether an update happened is public, so the coin that decided it adds no privacy beyond the lower
exposure.

Three observers, always reported together (theorem, proof and limits: docs/privacy.md):

- `team`: an outsider who sees all N agents. One episode is in every agent's gradient, so the
  joint sensitivity is √N · C. By post-processing the same ε bounds what an outsider learns who
  sees fewer than all agents.
- `agent`: the loss through one agent's own gradients, with sensitivity C, *conditional* on what its
  teammates contribute. Teammates learn from the episode too and feed it back through the team
  error; against an observer of one agent who may exploit that, only `team` is proven.
- `teammate`: no ε. It sees the opened sums before any noise, and knows the indices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pevdn.errors import UsageError, unknown
from pevdn.privacy import gaussian

RELATIONS = {
    "zero-out": "the episode is empty in one of the two streams, for the whole team",
    "add-or-remove": "the episode never happened in one of the two streams",
    "replace-one": "another episode stands in its place, or another record of one agent",
}
OBSERVERS = ("team", "agent")  # the proven one first
NO_NOISE = 0.05  # below this multiplier one update costs an ε in the hundreds: reported as infinite
ORDERS = [*(1 + x / 4 for x in range(1, 44)), *range(12, 64)]  # of the Rényi divergence
# The program adds discrete noise at a bounded distance from a Gaussian
# (docs/privacy.md, "Whole numbers"; `pevdn.privacy.gaussian`).
EXACTNESS = 1 - 2.0**-17  # the discrete noise hides at least as much as a Gaussian of σ · EXACTNESS
COORDINATES = 2.0**36  # upper bound on the numbers noised while one episode is in the buffer
LARGEST = 2**22  # parameters of a team; above it rounding takes a quarter or more off the clip norm
DISTANCE = COORDINATES * gaussian.DISTANCE  # total variation distance of all that noise together
TEAMMATE = (
    "none: a teammate sees every opened team error before any noise and knows the indices; only "
    "the secure sum protects an agent from it, and with two agents the sum gives the other away"
)


class Spent(NamedTuple):
    """ε for two observers at the same δ; infinite without noise. No ε holds for a teammate."""

    epsilon_agent: float
    epsilon_team: float
    delta: float


class Mechanism(NamedTuple):
    """The privacy parameters of one update, and the relation and δ that its loss is stated for."""

    sampling_rate: float  # q
    noise_multiplier: float  # σ
    n_agents: int  # N
    delta: float  # δ
    relation: str = "zero-out"

    def checked(self) -> Mechanism:
        """Return self, or raise a UsageError that names the value out of range."""
        if not 0 < self.sampling_rate <= 1:
            raise UsageError(
                f"the sampling rate q is {self.sampling_rate:g}, but must be above 0 and at most "
                "1: the expected batch cannot be larger than the buffer."
            )
        if not 0 < self.delta < 1:
            raise UsageError(f"delta is {self.delta:g}, but must be between 0 and 1.")
        if self.relation not in RELATIONS:
            raise unknown("neighbouring relation", self.relation, RELATIONS)
        return self

    def noise_seen(self, observer: str) -> float:
        """Return σ divided by the sensitivity of what the observer sees, in units of C."""
        return self.noise_multiplier / (math.sqrt(self.n_agents) if observer == "team" else 1.0)

    def steps(self, updates: int, observer: str) -> Steps:
        """Return `updates` updates as the observer sees them."""
        return Steps(updates, self.sampling_rate, self.noise_seen(observer))

    def epsilon(
        self, updates: int, observer: str, accountant: str = "pld", coarseness: float = 1.0
    ) -> float:
        """Return ε(δ) of an episode that was in the buffer during `updates` updates."""
        steps = self.steps(updates, observer)
        return epsilon(*steps, self.delta, self.relation, accountant, coarseness)

    def spent(self, exposure: int) -> Spent:
        """Return the privacy loss of an episode after `exposure` updates."""
        return Spent(self.epsilon(exposure, "agent"), self.epsilon(exposure, "team"), self.delta)

    def affordable(self, budget: float, observer: str, at_most: int) -> int:
        """Return the largest exposure up to `at_most` whose ε stays within the budget."""
        if self.epsilon(at_most, observer) <= budget:
            return at_most
        return largest_accepted(lambda n: self.epsilon(n, observer) <= budget, 0, at_most)


def largest_accepted(accepted: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest accepted integer by bisection; `low` is accepted and `high` is not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low


@lru_cache(maxsize=4096)
def epsilon(
    updates: int,
    sampling_rate: float,
    noise_multiplier: float,
    delta: float,
    relation: str = "zero-out",
    accountant: str = "pld",
    coarseness: float = 1.0,
) -> float:
    """Return an upper bound on ε(δ) of `updates` Poisson-subsampled Gaussian mechanisms."""
    steps = [Steps(updates, sampling_rate, noise_multiplier)]
    return composed(steps, delta, relation, accountant, coarseness)


class Steps(NamedTuple):
    """Identical Poisson-subsampled Gaussian mechanisms."""

    updates: int
    sampling_rate: float  # q
    noise_multiplier: float  # σ divided by the sensitivity of what the observer sees

    @property
    def event(self) -> Any:
        """Return the event for `dp-accounting`, with σ lowered to what discrete noise provides."""
        import dp_accounting as dp

        noise = dp.GaussianDpEvent(self.noise_multiplier * EXACTNESS)
        step = dp.PoissonSampledDpEvent(self.sampling_rate, noise)
        return dp.SelfComposedDpEvent(step, self.updates)


def composed(
    steps: Iterable[Steps],
    delta: float,
    relation: str = "zero-out",
    accountant: str = "pld",
    coarseness: float = 1.0,
) -> float:
    """Return an upper bound on ε(δ) of the composition of all steps.

    `pld` composes privacy loss distributions; `rdp` composes Rényi divergences (looser, and what
    Opacus reports). A coarser grid is faster and overstates ε more. For one update, emptying an
    episode gives the same pair of distributions as adding or removing a record of a fixed data set.
    In a FIFO buffer an older episode stays in the place of a missing one, so `add-or-remove` costs
    what `replace-one` costs.
    """
    steps = [some for some in steps if some.updates > 0]
    if not steps:
        return 0.0
    if min(some.noise_multiplier for some in steps) < NO_NOISE:
        return math.inf
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    rule = dp.NeighboringRelation
    neighbours = rule.REPLACE_SPECIAL if relation == "zero-out" else rule.REPLACE_ONE
    if accountant == "rdp":
        if neighbours is rule.REPLACE_ONE:
            raise UsageError(
                f"relation is '{relation}', but rdp accounts for 'zero-out' only; use pld."
            )
        account = renyi_account(ORDERS)
    else:
        # The grid scales with the losses and rounds them up: it overstates ε by less than 0.1 %.
        most = max(some.noise_multiplier for some in steps)
        interval = 1e-3 / most ** (1 if most > 1 else 2)
        account = PLDAccountant(neighbours, value_discretization_interval=interval * coarseness)
    for some in steps:
        account.compose(some.event)
    return at_delta(account, delta)


def check_size(parameters: int, exposure: int) -> None:
    """Raise a UsageError if a run noises more numbers than the accountant's error bound covers.

    `parameters` counts those of the whole team.
    """
    if parameters > LARGEST:
        raise UsageError(
            f"a team of {parameters:,} parameters is larger than the {LARGEST:,} that gradients "
            "can be clipped for in 32-bit numbers; lower hidden_size."
        )
    if parameters * exposure > COORDINATES:
        raise UsageError(
            f"a team of {parameters:,} parameters that makes up to {exposure:,} private updates "
            f"with one episode noises more than the {COORDINATES:.2g} numbers that ε is proven "
            "for; lower hidden_size or buffer_size, or raise update_every."
        )


def at_delta(account: Any, delta: float) -> float:
    """Return ε(δ) of an account, after deducting from δ the noise's distance from a Gaussian.

    If a mechanism is (ε, δ′)-private and each of its two output distributions is within total
    variation d of another mechanism's, the other mechanism is (ε, δ′ + (1 + e^ε) · d)-private.
    """
    gaussian_epsilon = float(account.get_epsilon(delta))
    if not math.isfinite(gaussian_epsilon):
        return gaussian_epsilon
    deducted = (1 + math.exp(min(gaussian_epsilon + 1, 700))) * DISTANCE
    if deducted > delta / 2:
        return math.inf
    exact = float(account.get_epsilon(delta - deducted))
    return exact if exact <= gaussian_epsilon + 1 else math.inf


def renyi_account(orders: Sequence[float]) -> Any:
    """Return an empty account of Rényi divergences for the relation `zero-out`."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns about orders it skips
    return RdpAccountant(orders, dp.NeighboringRelation.REPLACE_SPECIAL)


def theorem_1(
    buffer_size: int, throughput: float, sampling_rate: float, noise_multiplier: float, delta: float
) -> tuple[float, float]:
    """Return the paper's claim, (ε(buffer_size), δ) / throughput. For comparison only.

    Not sound for a throughput above 1: the parameters show whether an update happened, so dividing
    by the throughput counts the benefit of fewer updates twice
    (`test_theorem_1_claims_less_than_is_lost`). Nothing in this software relies on it.
    """
    whole = epsilon(buffer_size, sampling_rate, noise_multiplier, delta, accountant="rdp")
    return whole / throughput, delta / throughput
