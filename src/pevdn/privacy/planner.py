"""Compute the ε of a training before it starts, and find settings that fit a budget.

A plan's ε is an upper bound for every run with its settings that is not killed: it assumes the
longest stay in the buffer that the settings allow. With a throughput above 1, coins decide how many
updates fall into that stay; the plan then uses a number that the whole run exceeds with probability
at most `UNLUCKY`. The ε that a run actually spent is in its ledger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pevdn import worlds
from pevdn.config import presets
from pevdn.config.experiment import (
    STEPS,
    Config,
    default_delta,
    fingerprint,
    quarter,
    sampling_rate,
    updates_due,
)
from pevdn.errors import UsageError, unknown
from pevdn.privacy import accounting, randomness
from pevdn.privacy.accounting import OBSERVERS, Mechanism, largest_accepted
from pevdn.privacy.ledger import Ledger

if TYPE_CHECKING:
    from pevdn.privacy.mechanism import SubsampledGaussian

UNLUCKY = 1e-9  # probability that the coins of one seed exceed a plan
MANY = 10**6  # blocks of episodes of a plan without a number of steps
STEP = 1e-3  # resolution of noise multipliers that are searched for, rounded up
LARGEST_NOISE = 1e4
OBSERVER_LABELS = {"team": "team observer (proven)", "agent": "agent observer (conditional)"}
COARSE = 8.0  # grid for searching and drawing: a tenth of the time, overstates ε by about 0.02


@dataclass(frozen=True)
class Plan:
    """The settings that privacy depends on."""

    buffer_size: int = 1024
    batch_size: int = 32
    throughput: float = 1.0
    noise_multiplier: float = 1.0
    delta: float = 0.0  # 0: 1 / (10 · number of protected episodes)
    agents: int = 3
    relation: str = "zero-out"
    update_every: int = 1
    parallel_episodes: int = 8
    learning_starts: int = 0  # episodes before the first update; 0: a quarter of the buffer
    steps: int | None = None  # environment steps
    episodes: int | None = None  # protected, for δ; None: `steps`, or STEPS without steps

    def __post_init__(self) -> None:
        for name in ("buffer_size", "batch_size", "agents", "update_every", "parallel_episodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if self.batch_size > self.buffer_size:
            raise UsageError(
                f"batch_size is {self.batch_size}, but a buffer of {self.buffer_size} episodes "
                "cannot provide that many (the sampling rate would exceed 1); lower it."
            )
        if not self.throughput >= 1:
            raise UsageError(f"throughput is {self.throughput:g}, but must be at least 1.")
        if not 0 <= self.noise_multiplier < math.inf:
            raise UsageError(
                f"noise_multiplier is {self.noise_multiplier:g}, but must be finite and at least 0."
            )
        for name in ("steps", "episodes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} is {value}, but must be at least 1.")
        if self.delta == 0:
            object.__setattr__(self, "delta", default_delta(self.most_episodes))
        self.mechanism.checked()

    @classmethod
    def of(cls, config: Config, agents: int) -> Plan:
        """Return the plan of a run."""
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
        """Return an upper bound on the protected episodes: each takes at least one step."""
        return self.episodes or self.steps or STEPS

    @property
    def mechanism(self) -> Mechanism:
        rate = sampling_rate(self.batch_size, self.buffer_size)
        return Mechanism(rate, self.noise_multiplier, self.agents, self.delta, self.relation)

    @property
    def exposure(self) -> int:
        """Return the largest number of updates made while one episode is in the buffer.

        Episodes are stored in blocks, each followed by the updates due. An episode is overwritten
        `buffer_size` episodes later, or less than a block after that. Each episode takes at least
        one step, which bounds the blocks of a short run.
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

        chance = min(1.0, 1 / self.throughput + 2.0**-23)  # of an update, drawn in float32
        return int(binom.isf(UNLUCKY / with_updates, most, chance))

    def epsilon(self, observer: str, coarseness: float = 1.0) -> float:
        return self.mechanism.epsilon(self.exposure, observer, coarseness=coarseness)


def large_delta(plan: Plan) -> str | None:
    """Return a warning if δ exceeds 1 / (10 · number of protected episodes), else None.

    A mechanism that publishes each episode with probability δ is (0, δ)-private, so δ must be small
    compared with one over their number.
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


def begin_ledger(
    folder: Path, config: Config, release: SubsampledGaussian, agents: int, parameters: int
) -> Ledger:
    """Begin the ledger of a run, with the mechanism of the release that it will use.

    `parameters` is the number of parameters of the whole team.
    """
    exposure = Plan.of(config, agents).exposure
    accounting.check_size(parameters, exposure)
    mechanism = release.accounted(agents, config.delta, config.settings.relation)
    facts = (mechanism, config.seeds, exposure, affordable(config, agents))
    return Ledger.begin(folder, fingerprint(config), *facts, randomness.source(config))


def check_preset(
    preset: str | None, settings: Mapping[str, Any], config: Config, agents: int | None = None
) -> None:
    """Refuse a preset in a team of another size, where its noise gives another ε.

    An explicit noise multiplier among the `settings` lifts the check. `agents` defaults to the team
    size of the configured world.
    """
    if preset is None or "noise_multiplier" in settings:
        return
    chosen = presets.find(preset)
    agents = worlds.team_size(config.env) if agents is None else agents
    if agents == chosen.agents:
        return
    epsilon = Plan.of(config, agents).epsilon("team")
    raise UsageError(
        f"preset '{preset}' is for {chosen.agents} agents, but {config.env} has {agents}, for "
        f"which its noise multiplier of {chosen.settings['noise_multiplier']:g} gives ε team "
        f"{epsilon:.2f} instead of {chosen.epsilon:g}; find yours with `pevdn budget --preset "
        f"{preset} --agents {agents} --target-epsilon {chosen.epsilon:g}` and train with --set "
        "noise_multiplier=…"
    )


def report(plan: Plan) -> dict[str, Any]:
    """Return ε for each observer, the proven one first, by each accountant, and its inputs."""
    q, noise = plan.mechanism.sampling_rate, plan.noise_multiplier
    claim, claimed_delta = accounting.theorem_1(
        plan.buffer_size, plan.throughput, q, noise, plan.delta
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
        "theorem_1_unsound": plan.throughput > 1,  # it is about the agent observer in any case
        "teammate": accounting.TEAMMATE,
    }
    if plan.relation == "zero-out":
        for observer in OBSERVERS:
            document[f"epsilon_{observer}_rdp"] = plan.mechanism.epsilon(
                plan.exposure, observer, "rdp"
            )
    settings = ("buffer_size", "batch_size", "throughput", "agents", "update_every", "steps")
    return document | {name: getattr(plan, name) for name in settings}


def smallest_noise(plan: Plan, target: float, observer: str) -> Plan:
    """Return the plan with the smallest noise multiplier whose ε is within the target."""
    _check_target(target, observer)

    if plan.exposure == 0:
        return dataclasses.replace(plan, noise_multiplier=0.0)

    def cost(noise: float, coarseness: float) -> float:
        return dataclasses.replace(plan, noise_multiplier=noise).epsilon(observer, coarseness)

    return dataclasses.replace(plan, noise_multiplier=least_noise(cost, target))


def least_noise(cost: Callable[[float, float], float], target: float) -> float:
    """Return the smallest noise multiplier with cost(noise, grid coarseness) within the target.

    The result is a multiple of STEP, rounded up.
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
    # The fine grid is slow: use it once to calibrate the coarse one, and to check the result.
    fine = cost(high, 1.0)
    excess = cost(high, COARSE) / fine if fine else 1.0
    high = _bisect(lambda noise: cost(noise, COARSE) <= target * excess, 0.98 * high, high)
    steps = math.ceil(high / STEP - 1e-9)
    while cost(steps * STEP, 1.0) > target:
        steps += 1
    return round(steps * STEP, 9)


def _bisect(accepted: Callable[[float], bool], low: float, high: float) -> float:
    """Return the smallest accepted number above `low`, to within STEP; `high` is accepted."""
    while high - low > STEP / 2:
        middle = (low + high) / 2
        low, high = (low, middle) if accepted(middle) else (middle, high)
    return high


def largest_batch(plan: Plan, target: float, observer: str) -> Plan:
    """Return the plan with the largest expected batch whose ε is within the target."""
    _check_target(target, observer)

    def within(batch: int, coarseness: float = 1.0) -> bool:
        return dataclasses.replace(plan, batch_size=batch).epsilon(observer, coarseness) <= target

    if not within(1):
        least = dataclasses.replace(plan, batch_size=1).epsilon(observer)
        raise UsageError(
            f"target_epsilon is {target:g}, but even a batch of 1 episode costs ε {least:.3g} for "
            f"the {observer} observer; raise the noise multiplier (now {plan.noise_multiplier:g}) "
            "or the target."
        )
    batch = largest_accepted(lambda size: within(size, COARSE), 1, plan.buffer_size + 1)
    while batch < plan.buffer_size and within(batch + 1):
        batch += 1
    return dataclasses.replace(plan, batch_size=batch)


def _check_target(target: float, observer: str) -> None:
    if not 0 < target < math.inf:
        raise UsageError(f"target_epsilon is {target:g}, but must be a number above 0.")
    if observer not in OBSERVERS:
        raise unknown("observer", observer, OBSERVERS, "No ε holds for a teammate.")


def draw(plan: Plan, path: Path) -> None:
    """Draw ε of both observers against the noise multiplier and the batch size, around a plan."""
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
        for observer, colour in zip(OBSERVERS, ("C3", "C0"), strict=True):
            plans = [dataclasses.replace(plan, **{name: value}) for value in values]
            curve = [tried.epsilon(observer, COARSE) for tried in plans]
            axes.plot(values, curve, color=colour, marker=".", label=OBSERVER_LABELS[observer])
        axes.axvline(here, color="0.7", linewidth=1, zorder=0)
        axes.set(xscale="log", yscale="log", xlabel=name)
        axes.grid(alpha=0.3, which="both")
        axes.set_xticks(values)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:.3g}")  # plain numbers render faster
        axes.yaxis.set_major_formatter("{x:g}")
    by_noise.set(ylabel=f"ε at δ = {plan.delta:.2g}")
    by_noise.legend(frameon=False)
    figure.suptitle(
        f"buffer {plan.buffer_size}, batch {plan.batch_size}, noise {plan.noise_multiplier:g}, "
        f"{plan.agents} agents, {plan.exposure} updates per episode, {plan.relation}"
    )
    figure.savefig(path, dpi=120)
