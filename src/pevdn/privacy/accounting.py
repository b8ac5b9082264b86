"""How much privacy a run has spent so far, and what that means to whom.

An episode can only be learnt from while it is in the buffer. Its *exposure* is the number of
updates made in that time, counted by the program as they happen, and its loss composes exactly
that many Poisson-subsampled Gaussian steps at rate q = expected batch / buffer size. Whether an
update happened is public, so nothing is gained from the coin that decided it: the exposure
already is what the coin left over.

Three views, always together (docs/privacy.md has theorem, proof and limits):

- `team`: an outsider who sees all N agents. One episode is in every agent's gradient, so the
  joint sensitivity is √N · C. By post-processing it also bounds what any outsider learns who sees
  less than all agents.
- `agent`: the loss through one agent's own gradients, with sensitivity C, *given* what its
  teammates contribute. Teammates learn from the episode too and feed it back through the team
  error; against an observer of one agent who may exploit that, only `team` is proven.
- `teammate`: none. It sees the opened sums before any noise, and knows the indices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
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
NO_NOISE = 0.05  # below this multiplier ε is in the hundreds at once, and called infinite
ORDERS = [*(1 + x / 4 for x in range(1, 44)), *range(12, 64)]  # of Rényi divergence
# The program's noise is not a real Gaussian, but close enough to one to say by how much
# (docs/privacy.md, "Whole numbers"; `pevdn.privacy.gaussian`).
EXACTNESS = 1 - 2.0**-17  # a Gaussian of so much less deviation gives away no less
COORDINATES = 2.0**36  # more numbers than any training noises while one episode is in the buffer
LARGEST = 2**22  # parameters of a team: more would take a quarter off the clip norm, or more
DISTANCE = COORDINATES * gaussian.DISTANCE  # in total variation, of all their noise together
TEAMMATE = (
    "none: a teammate sees every opened team error before any noise and knows the indices; only "
    "the secure sum protects an agent from it, and with two agents the sum gives the other away"
)


class Spent(NamedTuple):
    """ε for both views at the same δ; infinite without noise. For a teammate there is none."""

    epsilon_agent: float
    epsilon_team: float
    delta: float


class Mechanism(NamedTuple):
    """What one update does to an episode in the buffer, and how its loss is to be told."""

    sampling_rate: float  # q
    noise_multiplier: float  # σ
    n_agents: int  # N
    delta: float  # δ
    relation: str = "zero-out"

    def checked(self) -> Mechanism:
        """The same, or one sentence about what is out of range."""
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

    def noise_seen(self, view: str) -> float:
        """σ over the sensitivity of what an observer sees, in units of C."""
        return self.noise_multiplier / (math.sqrt(self.n_agents) if view == "team" else 1.0)

    def steps(self, updates: int, view: str) -> Steps:
        """What so many updates are to an observer."""
        return Steps(updates, self.sampling_rate, self.noise_seen(view))

    def epsilon(
        self, updates: int, view: str, accountant: str = "pld", coarseness: float = 1.0
    ) -> float:
        """ε(δ) of an episode that was in the buffer during `updates` updates."""
        seen = self.steps(updates, view)
        return epsilon(*seen, self.delta, self.relation, accountant, coarseness)

    def spent(self, exposure: int) -> Spent:
        """What the most exposed episode has lost after `exposure` updates."""
        return Spent(self.epsilon(exposure, "agent"), self.epsilon(exposure, "team"), self.delta)

    def affordable(self, budget: float, view: str, at_most: int) -> int:
        """The largest exposure up to `at_most` whose ε stays within the budget."""
        if self.epsilon(at_most, view) <= budget:
            return at_most
        low, high = 0, at_most  # ε(low) is within, ε(high) is above
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle, view) <= budget else (low, middle)
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
    """ε(δ) of `updates` Poisson-subsampled Gaussians, never too small."""
    steps = [Steps(updates, sampling_rate, noise_multiplier)]
    return composed(steps, delta, relation, accountant, coarseness)


class Steps(NamedTuple):
    """So many Poisson-subsampled Gaussians of one kind."""

    updates: int
    sampling_rate: float  # q
    noise_multiplier: float  # σ, over the sensitivity of what is seen

    @property
    def event(self) -> Any:
        """The same for `dp-accounting`, with as much noise as the program's is certain to have."""
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
    """ε(δ) of all these steps together, never too small.

    By privacy loss distributions (`pld`), or by Rényi divergences (`rdp`, looser, what Opacus
    reports). A coarser grid is faster and overstates more. For one update, emptying an episode is
    the same pair of distributions as adding or removing a record of a fixed data set. In a FIFO
    buffer a missing episode lets an older one stay in its place, so `add-or-remove` costs what
    `replace-one` costs.
    """
    made = [some for some in steps if some.updates > 0]
    if not made:
        return 0.0
    if min(some.noise_multiplier for some in made) < NO_NOISE:
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
        ledger = renyi(ORDERS)
    else:
        # The grid rounds losses up: ε is overstated, by less than 0.1 %. It follows their scale.
        most = max(some.noise_multiplier for some in made)
        interval = 1e-3 / most ** (1 if most > 1 else 2)
        ledger = PLDAccountant(neighbours, value_discretization_interval=interval * coarseness)
    for some in made:
        ledger.compose(some.event)
    return at_delta(ledger, delta)


def check_size(parameters: int, exposure: int) -> None:
    """One sentence if more numbers are noised than the accountant's error is stated for.

    `parameters` are those of the whole team.
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


def at_delta(ledger: Any, delta: float) -> float:
    """ε(δ) of an account, with what the distance of the noise from a Gaussian takes of δ.

    If a mechanism is (ε, δ′)-private and each of its two laws is within d of another one's in
    total variation, the other mechanism is (ε, δ′ + (1 + e^ε) · d)-private.
    """
    found = float(ledger.get_epsilon(delta))
    if not math.isfinite(found):
        return found
    taken = (1 + math.exp(min(found + 1, 700))) * DISTANCE
    if taken > delta / 2:
        return math.inf
    exact = float(ledger.get_epsilon(delta - taken))
    return exact if exact <= found + 1 else math.inf


def renyi(orders: Sequence[float]) -> Any:
    """An empty account of Rényi divergences, for episodes that are emptied."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of orders it leaves out
    return RdpAccountant(orders, dp.NeighboringRelation.REPLACE_SPECIAL)


def theorem_1(
    buffer_size: int, throughput: float, sampling_rate: float, noise_multiplier: float, delta: float
) -> tuple[float, float]:
    """`theorem-1`: what the paper claims, (ε(buffer_size), δ) / throughput. For comparison only.

    Not sound for a throughput above 1: whether an update happened shows in the parameters, so
    dividing by the throughput counts twice what fewer updates already gave
    (`test_theorem_1_claims_less_than_is_lost`). Nothing in this software relies on it.
    """
    whole = epsilon(buffer_size, sampling_rate, noise_multiplier, delta, accountant="rdp")
    return whole / throughput, delta / throughput
