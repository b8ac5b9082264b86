"""Compute the privacy loss of a run, and state which observer it holds against.

Updates can use an episode only while it is in the buffer. Its *exposure* is the number of updates
made in that time, counted by the program as they happen. Its privacy loss is the composition of
exactly that many Poisson-subsampled Gaussian mechanisms at rate q = expected batch / buffer size.
Whether an update happened is public, so the coin that decided it adds no privacy beyond the lower
exposure.

Observers, always reported together (theorem, proof and limits: docs/privacy.md):

- `record` (pe-vdn-d): any t teammates, pooled with any outsider. They see all opened sums and all
  parameters at all times. Protected is one agent's *record* of one episode. It is in n noised
  openings and in the agent's own updates, with samples that only this agent knows.
- `coalition` (pe-vdn-d): the same observer, but protected is a whole episode of all h agents
  outside the coalition: their updates compose, and their messages add up to h times the norm. One
  teammate alone is the worst coalition, h = N − 1.
- `team`: an outsider who sees all N agents. One episode is in every agent's gradient, so the
  joint sensitivity is √N · C. With pe-vdn-d each agent draws its own sample, so N times as many
  updates compose instead, each of sensitivity C. By post-processing the same ε bounds what an
  outsider learns who sees fewer than all agents.
- `agent`: the loss through one agent's own gradients, with sensitivity C, *conditional* on what its
  teammates contribute. Teammates learn from the episode too and feed it back through the team
  error; against an observer of one agent who may exploit that, only `team` is proven.
- `teammate`: with pe-vdn-d it is the observer of `record`. Otherwise no ε holds: it sees the
  opened sums before any noise, and knows the indices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from pevdn.errors import UsageError, unknown
from pevdn.privacy import gaussian

RELATIONS = {
    "zero-out": "the episode is empty in one of the two streams, for the whole team",
    "add-or-remove": "the episode never happened in one of the two streams",
    "replace-one": "another episode stands in its place, or another record of one agent",
}
EMPTY_RECORD = (  # the relation of ε record
    "one agent's record of the episode is empty in one of the two streams, and the records of its "
    "teammates, the rewards and the lengths stay"
)
EMPTY_RECORDS = (  # the relation of ε coalition
    "the records of all agents outside the coalition are empty in one of the two streams, and "
    "those of the coalition, the rewards and the lengths stay"
)
DURATION = "how long updates take"  # follows from secret samples; ε record does not cover it
UNCOVERED = "no guarantee against teammates: ε record is infinite"
OBSERVERS = ("team", "agent")  # the proven one first; with noised openings `record` precedes them
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
    """ε by observer at the same δ; infinite without noise. No ε record without noised openings."""

    epsilon_agent: float
    epsilon_team: float
    delta: float
    epsilon_record: float | None = None

    @property
    def known(self) -> dict[str, float]:
        """The figures by name, that of the strongest observer first."""
        record = {} if self.epsilon_record is None else {"epsilon_record": self.epsilon_record}
        own = {"epsilon_team": self.epsilon_team, "epsilon_agent": self.epsilon_agent}
        return {**record, **own, "delta": self.delta}


class Mechanism(NamedTuple):
    """The privacy parameters of one update, and the relation and δ that its loss is stated for."""

    sampling_rate: float  # q
    noise_multiplier: float  # σ
    n_agents: int  # N
    delta: float  # δ
    relation: str = "zero-out"
    openings: int = 0  # n: noised openings of each record; 0: openings carry no noise
    opening_noise: float = 0.0  # s/M: that hides one record in an opened sum
    colluders: int = 0  # t: teammates that pool what they see

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
        if self.noised and self.relation != "zero-out":
            raise UsageError(
                f"relation is '{self.relation}', but noised openings are accounted for with "
                "'zero-out' only, where one agent's record of an episode is empty; leave it out."
            )
        return self

    @property
    def noised(self) -> bool:
        """Whether openings are noised, and each agent draws its own sample (pe-vdn-d)."""
        return self.openings > 0

    @property
    def observers(self) -> tuple[str, ...]:
        """The observers to report, the strongest first."""
        return ("record", *OBSERVERS) if self.noised else OBSERVERS

    def noise_seen(self, observer: str) -> float:
        """Return σ divided by the sensitivity of what the observer sees, in units of C."""
        jointly = observer == "team" and not self.noised
        return self.noise_multiplier / (math.sqrt(self.n_agents) if jointly else 1.0)

    def steps(self, updates: int, observer: str, openings: int | None = None) -> tuple[Steps, ...]:
        """Return what the observer sees of an episode, or of a record of it.

        The episode was in the buffer during `updates` updates of each agent, and was opened
        `openings` times (default: n).
        """
        agents = {"team": self.n_agents, "coalition": max(1, self.n_agents - 1)}.get(observer, 1)
        if not self.noised:
            return (Steps(updates, self.sampling_rate, self.noise_seen(observer)),)
        learnt = Steps(agents * updates, self.sampling_rate, self.noise_multiplier)
        if observer in OBSERVERS:
            return (learnt,)
        opened = self.openings if openings is None else openings
        noise = self.opening_noise
        if observer == "coalition":  # sensitivity h · M, noise of h agents
            noise /= math.sqrt(agents * max(1, self.n_agents - self.colluders))
        return learnt, Steps(opened, 1.0, noise)

    def epsilon(
        self,
        updates: int,
        observer: str,
        accountant: str = "pld",
        coarseness: float = 1.0,
        openings: int | None = None,
    ) -> float:
        """Return ε(δ) of an episode that was in the buffer during `updates` updates.

        With noised openings, it was opened `openings` times (default: n).
        """
        steps = self.steps(updates, observer, openings)
        return _composed(steps, self.delta, self.relation, accountant, coarseness)

    def spent(self, exposure: int, openings: int | None = None) -> Spent:
        """Return the privacy loss of an episode after `exposure` updates (and n openings)."""
        of = partial(self.epsilon, exposure, openings=openings)
        record = of("record") if self.noised else None
        return Spent(of("agent"), of("team"), self.delta, record)

    def affordable(
        self, budget: float, observer: str, at_most: int, openings: int | None = None
    ) -> int:
        """Return the largest exposure up to `at_most` whose ε stays within the budget, or 0."""

        def within(exposure: int) -> bool:
            return self.epsilon(exposure, observer, openings=openings) <= budget

        return at_most if within(at_most) else largest_accepted(within, 0, at_most)


def largest_accepted(accepted: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest accepted integer by bisection; `low` is accepted and `high` is not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low


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
    steps = (Steps(updates, sampling_rate, noise_multiplier),)
    return _composed(steps, delta, relation, accountant, coarseness)


class Steps(NamedTuple):
    """Identical Poisson-subsampled Gaussian mechanisms: updates, or openings of one record."""

    updates: int
    sampling_rate: float  # q; 1 for openings, which are plain Gaussian mechanisms
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
        # The smallest losses need the finest grid, unless much larger ones outweigh them.
        noises = [some.noise_multiplier for some in steps]
        interval = max(_interval(max(noises)), _interval(min(noises)) / 10)
        account = PLDAccountant(neighbours, value_discretization_interval=interval * coarseness)
    for some in steps:
        account.compose(some.event)
    return at_delta(account, delta)


@lru_cache(maxsize=4096)
def _composed(
    steps: tuple[Steps, ...], delta: float, relation: str, accountant: str, coarseness: float
) -> float:
    return composed(steps, delta, relation, accountant, coarseness)


def _interval(noise: float) -> float:
    """Return the grid on which the losses of Gaussian mechanisms with this noise are rounded."""
    return 1e-3 / noise ** (1 if noise > 1 else 2)


def coalition_size(colluders: int, n_agents: int) -> int:
    """Return t, the largest number of teammates that may pool what they see; 0 is all but one."""
    if colluders < 0:
        raise UsageError(f"colluders is {colluders}, but must be at least 0.")
    if colluders >= max(2, n_agents):
        raise UsageError(
            f"colluders is {colluders}, but at most {max(1, n_agents - 1)} of {n_agents} agents "
            "can pool what they see against another; lower it, or leave it out for all but one."
        )
    return min(colluders, n_agents - 1) or max(0, n_agents - 1)


def covers_teammates(epsilon_record: float | None) -> bool:
    """Return whether teammates are among those that a run's guarantee holds against."""
    return epsilon_record is not None and math.isfinite(epsilon_record)


def teammate(mechanism: Mechanism, epsilon_record: float | None = None) -> str:
    """Return what is promised about a teammate in one sentence, given ε record if there is one."""
    if epsilon_record is None:
        return TEAMMATE
    if not covers_teammates(epsilon_record):
        return (
            f"{UNCOVERED} at opening_noise {mechanism.opening_noise:g} and "
            f"noise_multiplier {mechanism.noise_multiplier:g}: a teammate sees opened sums and "
            "parameters that hide too little; raise them"
        )
    return (
        f"ε record {epsilon_record:.3g} for one agent's record of an episode, against a coalition "
        f"of up to t = {mechanism.colluders} pooled with any outsider, who see all opened sums "
        f"(n = {mechanism.openings} of each record) and all parameters; proven, but does not cover "
        f"{DURATION}"
    )


def check_size(parameters: int, exposure: int, opened: int = 0) -> None:
    """Raise a UsageError if a run noises more numbers than the accountant's error bound covers.

    `parameters` counts those of the whole team, `opened` the noised messages of one episode.
    """
    if parameters > LARGEST:
        raise UsageError(
            f"a team of {parameters:,} parameters is larger than the {LARGEST:,} that gradients "
            "can be clipped for in 32-bit numbers; lower hidden_size."
        )
    if parameters * exposure + opened > COORDINATES:
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
