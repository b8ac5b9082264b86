"""What a training will cost before it is started, and which settings a budget affords.

A plan's ε is an upper bound for every run with its settings that is not killed: it assumes the
longest stay in the buffer that the settings allow. With a throughput above 1 coins decide how many
updates fall into that stay; the plan then takes a number that the whole run exceeds with
probability `UNLUCKY` at most. What a run really spent is in its own ledger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pevdn.config.experiment import STEPS, default_delta, quarter, updates_due
from pevdn.errors import UsageError, unknown
from pevdn.privacy import accounting
from pevdn.privacy.accounting import OBSERVERS, Mechanism

if TYPE_CHECKING:
    from pevdn.config.experiment import Config

UNLUCKY = 1e-9  # chance that the coins of one seed exceed a plan
MANY = 10**6  # blocks of episodes, where a plan names no number of steps
STEP = 1e-3  # noise multipliers are found to this accuracy, rounded up
LARGEST_NOISE = 1e4
OBSERVER_LABELS = {"team": "team view (proven)", "agent": "agent view (conditional)"}
COARSE = 8.0  # a grid for searching and drawing: a tenth of the time, ε overstated by some 0.02


@dataclass(frozen=True)
class Plan:
    """The settings that privacy depends on."""

    buffer_size: int = 1024
    batch_size: int = 32
    throughput: float = 1.0
    noise_multiplier: float = 1.0
    delta: float = 0.0  # 0: a tenth of one over the protected episodes
    agents: int = 3
    relation: str = "zero-out"
    update_every: int = 1
    parallel_episodes: int = 8
    learning_starts: int = 0  # episodes before the first update; 0: a quarter of the buffer
    steps: int | None = None  # environment steps
    episodes: int | None = None  # protected ones, for δ; None: as many as steps, or as STEPS

    def __post_init__(self) -> None:
        for name in ("buffer_size", "batch_size", "agents", "update_every", "parallel_episodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if self.batch_size > self.buffer_size:
            raise UsageError(
                f"batch_size is {self.batch_size}, but a buffer of {self.buffer_size} episodes "
                "cannot give that many (the sampling rate would be above 1); lower it."
            )
        if not self.throughput >= 1:
            raise UsageError(f"throughput is {self.throughput:g}, but must be at least 1.")
        if not 0 <= self.noise_multiplier < math.inf:
            raise UsageError(
                f"noise_multiplier is {self.noise_multiplier:g}, but must be a number, at least 0."
            )
        for name in ("steps", "episodes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} is {value}, but must be at least 1.")
        if self.delta == 0:
            object.__setattr__(self, "delta", default_delta(self.most_episodes))
        self.mechanism.checked()

    @classmethod
    def of(cls, config: Config, agents: int) -> Plan:
        """The plan that a run follows."""
        s = config.settings
        return cls(
            s.buffer_size,
            s.expected_batch_size,
            s.buffer_throughput,
            s.noise_multiplier,
            config.delta,
            agents,
            s.relation,
            s.update_every,
            s.parallel_episodes,
            config.learning_starts,
            config.steps,
        )

    @property
    def most_episodes(self) -> int:
        """How many episodes are protected, at most: every episode takes a step, or more."""
        return self.episodes or self.steps or STEPS

    @property
    def mechanism(self) -> Mechanism:
        rate = self.batch_size / self.buffer_size
        return Mechanism(rate, self.noise_multiplier, self.agents, self.delta, self.relation)

    @property
    def exposure(self) -> int:
        """The most updates that any episode is in the buffer for.

        Episodes are stored in blocks, each followed by the updates that it calls for. An episode
        is overwritten in the block that comes `buffer_size` episodes later, or less than a block
        after that. Every episode takes a step at least, which bounds a run of few steps.
        """
        due = updates_due(self.parallel_episodes, self.update_every)
        block = due * self.update_every
        stay = -(-self.buffer_size // block)  # in blocks
        if self.steps is None:
            with_updates = max(MANY, stay)
        else:
            begin = self.learning_starts or quarter(self.buffer_size)
            with_updates = max(0, -(-self.steps // block) - -(-begin // block) + 1)
        most = due * min(with_updates, stay)
        if self.throughput == 1 or most == 0:
            return most
        from scipy.stats import binom

        chance = min(1.0, 1 / self.throughput + 2.0**-23)  # of a coin in float32
        return int(binom.isf(UNLUCKY / with_updates, most, chance))

    def epsilon(self, view: str, coarseness: float = 1.0) -> float:
        return self.mechanism.epsilon(self.exposure, view, coarseness=coarseness)


def large_delta(plan: Plan) -> str | None:
    """A note if δ is above a tenth of one over the number of protected episodes.

    A mechanism that publishes every episode with probability δ is (0, δ)-private, so δ has to be
    small against one over their number.
    """
    enough = default_delta(plan.most_episodes)
    if plan.delta <= enough * (1 + 1e-9):
        return None
    return (
        f"delta is {plan.delta:g}, but should be at most a tenth of one over the number of "
        f"protected episodes, which can be {plan.most_episodes:,} here: {enough:g} would do "
        "(delta=0 sets it)."
    )


def affordable(config: Config, agents: int) -> int | None:
    """Return the exposure that the run's budget allows; None without a budget."""
    s = config.settings
    if not s.epsilon_budget:
        return None
    mechanism = Plan.of(config, agents).mechanism
    most = 4 * s.buffer_size  # more than any run that is not killed all the time
    exposure = mechanism.affordable(s.epsilon_budget, s.budget_observer, most)
    if exposure == 0:
        first = mechanism.epsilon(1, s.budget_observer)
        raise UsageError(
            f"epsilon_budget is {s.epsilon_budget:g}, but the first update already costs "
            f"{first:.3g} for the {s.budget_observer} observer; raise the budget or "
            f"noise_multiplier (now {s.noise_multiplier:g})."
        )
    return exposure


def report(plan: Plan) -> dict[str, Any]:
    """ε for each view, the proven one first, by each accountant, with what it rests on."""
    claim, claimed_delta = accounting.theorem_1(
        plan.buffer_size,
        plan.throughput,
        plan.mechanism.sampling_rate,
        plan.noise_multiplier,
        plan.delta,
    )
    document: dict[str, Any] = {
        "epsilon_team": plan.epsilon("team"),
        "epsilon_agent": plan.epsilon("agent"),
        "epsilon_teammate": None,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.mechanism.sampling_rate,
        "exposure": plan.exposure,
        "relation": plan.relation,
        "theorem_1_epsilon": claim,
        "theorem_1_delta": claimed_delta,
        "theorem_1_unsound": plan.throughput > 1,  # and of the agent view in any case
        "teammate": accounting.TEAMMATE,
    }
    if plan.relation == "zero-out":
        for view in OBSERVERS:
            document[f"epsilon_{view}_rdp"] = plan.mechanism.epsilon(plan.exposure, view, "rdp")
    settings = ("buffer_size", "batch_size", "throughput", "agents", "update_every", "steps")
    return document | {name: getattr(plan, name) for name in settings}


def smallest_noise(plan: Plan, target: float, view: str) -> Plan:
    """The plan with the smallest noise multiplier whose ε is within the target."""
    _check_target(target, view)

    if plan.exposure == 0:
        return dataclasses.replace(plan, noise_multiplier=0.0)

    def cost(noise: float, coarseness: float) -> float:
        return dataclasses.replace(plan, noise_multiplier=noise).epsilon(view, coarseness)

    return dataclasses.replace(plan, noise_multiplier=least_noise(cost, target))


def least_noise(cost: Callable[[float, float], float], target: float) -> float:
    """The smallest noise multiplier for which cost(noise, coarseness of the grid) is within target.

    To within a STEP, and rounded up.
    """
    high = 1.0
    while cost(high, COARSE) > target:
        high *= 2
        if high > LARGEST_NOISE:
            raise UsageError(
                f"target_epsilon is {target:g}, but no noise multiplier up to {LARGEST_NOISE:g} "
                "reaches it; raise the target, delta or the buffer."
            )
    high = _bisect(lambda noise: cost(noise, COARSE) <= target, 0.0, high)
    # The fine grid is slow: ask it once by how much the coarse one overstates, and at the end.
    fine = cost(high, 1.0)
    excess = cost(high, COARSE) / fine if fine else 1.0
    high = _bisect(lambda noise: cost(noise, COARSE) <= target * excess, 0.98 * high, high)
    found = math.ceil(high / STEP - 1e-9)
    while cost(found * STEP, 1.0) > target:
        found += 1
    return round(found * STEP, 9)


def _bisect(accepted: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest accepted number above `low`, to within a STEP; `high` is accepted."""
    while high - low > STEP / 2:
        middle = (low + high) / 2
        low, high = (low, middle) if accepted(middle) else (middle, high)
    return high


def largest_batch(plan: Plan, target: float, view: str) -> Plan:
    """The plan with the largest expected batch whose ε is within the target."""
    _check_target(target, view)

    def within(batch: int, coarseness: float = 1.0) -> bool:
        return dataclasses.replace(plan, batch_size=batch).epsilon(view, coarseness) <= target

    if not within(1):
        least = dataclasses.replace(plan, batch_size=1).epsilon(view)
        raise UsageError(
            f"target_epsilon is {target:g}, but even a batch of 1 episode costs {least:.3g} in the "
            f"{view} view; raise the noise multiplier (now {plan.noise_multiplier:g}) or the "
            "target."
        )
    low, high = 1, plan.buffer_size + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle, COARSE) else (low, middle)
    while low < plan.buffer_size and within(low + 1):
        low += 1
    return dataclasses.replace(plan, batch_size=low)


def _check_target(target: float, view: str) -> None:
    if not 0 < target < math.inf:
        raise UsageError(f"target_epsilon is {target:g}, but must be a number above 0.")
    if view not in OBSERVERS:
        raise unknown("view", view, OBSERVERS, "A teammate has no ε to aim at.")


def draw(plan: Plan, path: Path) -> None:
    """ε of both views against the noise multiplier and against the batch, around a plan."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    by_noise, by_batch = figure.subplots(1, 2, sharey=True)
    centre = plan.noise_multiplier or 1.0
    noises = [centre * 2 ** (i / 2) for i in range(-2, 5)]
    batches = sorted(
        {min(plan.buffer_size, max(1, round(plan.batch_size * 2.0**i))) for i in range(-3, 3)}
    )
    panels: tuple[tuple[Any, str, list[Any], float], ...] = (
        (by_noise, "noise_multiplier", noises, centre),
        (by_batch, "batch_size", batches, plan.batch_size),
    )
    for axes, name, values, here in panels:
        for view, colour in zip(OBSERVERS, ("C3", "C0"), strict=True):
            plans = [dataclasses.replace(plan, **{name: value}) for value in values]
            curve = [tried.epsilon(view, COARSE) for tried in plans]
            axes.plot(values, curve, color=colour, marker=".", label=OBSERVER_LABELS[view])
        axes.axvline(here, color="0.7", linewidth=1, zorder=0)
        axes.set(xscale="log", yscale="log", xlabel=name)
        axes.grid(alpha=0.3, which="both")
        axes.set_xticks(values)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:.3g}")  # plain numbers, which are also drawn faster
        axes.yaxis.set_major_formatter("{x:g}")
    by_noise.set(ylabel=f"ε at δ = {plan.delta:.2g}")
    by_noise.legend(frameon=False)
    figure.suptitle(
        f"buffer {plan.buffer_size}, batch {plan.batch_size}, noise {plan.noise_multiplier:g}, "
        f"{plan.agents} agents, {plan.exposure} updates an episode, {plan.relation}"
    )
    figure.savefig(path, dpi=120)
