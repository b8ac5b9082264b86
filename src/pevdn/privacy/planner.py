"""Compute the ε of a training before it starts, and find settings that fit a budget.

A plan's ε is an upper bound for every run with its settings that is not killed: it assumes the
longest stay in the buffer that the settings allow. With a throughput above 1, coins decide how many
updates fall into that stay; the plan then uses a number that the whole run exceeds with probability
at most `UNLUCKY`. The ε that a run actually spent is in its ledger.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
from pevdn.config.settings import LARGEST, setting_fields
from pevdn.errors import UsageError, unknown
from pevdn.privacy import accounting, randomness
from pevdn.privacy.accounting import Mechanism, largest_accepted
from pevdn.privacy.ledger import Ledger

if TYPE_CHECKING:
    from pevdn.privacy.mechanism import SubsampledGaussian

UNLUCKY = 1e-9  # probability that the coins of one seed exceed a plan
LONGEST = 2**20  # steps of an episode, if their number is not known
MANY = 10**6  # blocks of episodes of a plan without a number of steps
STEP = 1e-3  # resolution of noise multipliers that are searched for, rounded up
LARGEST_NOISE = 1e4
OBSERVER_LABELS = {
    "record": "teammates and outsiders (proven)",
    "team": "team observer (proven)",
    "agent": "agent observer (conditional)",
}
COLOURS = {"record": "C2", "team": "C3", "agent": "C0"}
NOISES = ("noise_multiplier", "opening_noise")  # that a target can be reached with
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
    openings: int = 0  # n: noised openings of each record (pe-vdn-d); 0: openings carry no noise
    opening_noise: float = 1.0  # s/M; without effect if openings is 0, as is the next
    colluders: int = 0  # t: teammates that pool what they see; 0: all but one

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
        for name in NOISES:
            if not 0 <= (value := getattr(self, name)) <= LARGEST:
                raise UsageError(
                    f"{name} is {value:g}, but must be at least 0 and at most {LARGEST:g}."
                )
        if self.openings > (most := setting_fields()["openings"].metadata["high"]):
            raise UsageError(f"openings is {self.openings}, but must be at most {most}.")
        if not 0 <= self.openings <= (fitting := max(1, self.buffer_size // self._block)):
            raise UsageError(
                f"openings is {self.openings}, but an episode is in the buffer for {fitting} "
                f"blocks of {self._block} episodes and is opened at most once in each."
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
            openings=s.openings if config.noised else 0,
            opening_noise=s.opening_noise,
            colluders=s.colluders,
        )

    @property
    def most_episodes(self) -> int:
        """Return an upper bound on the protected episodes: each takes at least one step."""
        return self.episodes or self.steps or STEPS

    @property
    def mechanism(self) -> Mechanism:
        rate = sampling_rate(self.batch_size, self.buffer_size)
        update = Mechanism(rate, self.noise_multiplier, self.agents, self.delta, self.relation)
        if not self.openings:
            return update
        t = accounting.coalition_size(self.colluders, self.agents)
        return update._replace(
            openings=self.openings, opening_noise=self.opening_noise, colluders=t
        )

    @property
    def _block(self) -> int:
        """Episodes that are stored together."""
        return updates_due(self.parallel_episodes, self.update_every) * self.update_every

    @property
    def exposure(self) -> int:
        """Return the largest number of updates made while one episode is in the buffer.

        Episodes are stored in blocks, each followed by the updates due. An episode is overwritten
        `buffer_size` episodes later, or less than a block after that. Each episode takes at least
        one step, which bounds the blocks of a short run.
        """
        due, block = updates_due(self.parallel_episodes, self.update_every), self._block
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


def unused_openings(config: Config) -> str | None:
    """Return a warning if settings of noised openings are set where openings carry no noise."""
    fields, own = setting_fields(), ("openings", "message_norm", "opening_noise", "colluders")
    given = [n for n in own if getattr(config.settings, n) != fields[n].default]
    if config.noised or not given:
        return None
    return (
        f"{' and '.join(given)} ha{'ve' if len(given) > 1 else 's'} no effect: {config.algorithm} "
        "adds no noise to opened sums; train pe-vdn-d for a guarantee against teammates."
    )


def covers_teammates(config: Config) -> bool:
    """Return whether ε record of a run is finite, unless the run is killed all the time.

    It is the same in all teams. A budget for another observer is not considered.
    """
    s = config.settings
    if not config.noised:
        return False
    if s.epsilon_budget and s.budget_observer == "record":
        return True
    plan = Plan.of(config, max(2, s.colluders + 1))
    return accounting.covers_teammates(plan.epsilon("record"))


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
        noised = s.budget_observer == "record"
        n = s.openings
        openings = f", with {n} opening{'s' * (n > 1)} of each record," if noised else ""
        opening_noise = f" or opening_noise (now {s.opening_noise:g})" if noised else ""
        raise UsageError(
            f"epsilon_budget is {s.epsilon_budget:g}, but the first update{openings} already costs "
            f"{first:.3g} for the {s.budget_observer} observer; raise the budget or "
            f"noise_multiplier (now {s.noise_multiplier:g}){opening_noise}."
        )
    return exposure


def begin_ledger(
    folder: Path,
    config: Config,
    release: SubsampledGaussian,
    agents: int,
    parameters: int,
    max_steps: int = LONGEST,
) -> Ledger:
    """Begin the ledger of a run, with the mechanism of the release that it will use.

    `parameters` is the number of parameters of the whole team, `max_steps` that of the steps of an
    episode: with noised openings, each agent adds noise at every step.
    """
    s, exposure = config.settings, Plan.of(config, agents).exposure
    accounting.check_size(
        parameters, exposure, s.openings * max_steps * agents if config.noised else 0
    )
    mechanism = release.accounted(agents, config.delta, s.relation)
    if config.noised:
        from pevdn.privacy.mechanism import NoisedOpening

        mechanism = NoisedOpening.of(s, agents).accounted(mechanism)
    budget = (s.epsilon_budget, s.budget_observer) if s.epsilon_budget else None
    facts = (mechanism, config.seeds, exposure, affordable(config, agents))
    return Ledger.begin(folder, fingerprint(config), *facts, randomness.source(config), budget)


def check_preset(
    preset: str | None, settings: Mapping[str, Any], config: Config, agents: int | None = None
) -> None:
    """Refuse a preset in a team of another size, where its noise gives another ε.

    An explicit noise multiplier among the `settings` lifts the check. `agents` defaults to the team
    size of the configured world. ε record is the same in all teams (see `other_team`).
    """
    if preset is None or "noise_multiplier" in settings:
        return
    chosen = presets.find(preset)
    if chosen.observer == "record":
        return
    agents = worlds.team_size(config.env) if agents is None else agents
    if agents == chosen.agents:
        return
    epsilon = Plan.of(config, agents).epsilon(chosen.observer)
    raise UsageError(
        f"preset '{preset}' is for {chosen.agents} agents, but {config.env} has {agents}, for "
        f"which its noise multiplier of {chosen.settings['noise_multiplier']:g} gives ε "
        f"{chosen.observer} {epsilon:.2f} instead of {chosen.epsilon:g}; find yours with `pevdn "
        f"budget --preset {preset} --agents {agents} --target-epsilon {chosen.epsilon:g}` and "
        "train with --set noise_multiplier=…"
    )


def other_team(
    preset: str | None, settings: Mapping[str, Any], config: Config, agents: int | None = None
) -> str | None:
    """Return what changes with a team of another size than that of a preset for ε record, or None.

    The arguments are those of `check_preset`.
    """
    if preset is None or "noise_multiplier" in settings:
        return None
    chosen = presets.find(preset)
    if chosen.observer != "record":
        return None
    agents = worlds.team_size(config.env) if agents is None else agents
    if agents == chosen.agents:
        return None
    here = Plan.of(config, agents)
    colluders = min(here.colluders, chosen.agents - 1)
    there = dataclasses.replace(here, agents=chosen.agents, colluders=colluders)
    figures = {who: (here.epsilon(who), there.epsilon(who)) for who in ("team", "coalition")}
    changed = [
        f"ε {who} is {now:.2f} instead of {before:.2f}"
        for who, (now, before) in figures.items()
        if f"{now:.2f}" != f"{before:.2f}"
    ]
    if not changed:
        return None
    return (
        f"preset '{preset}' is for {chosen.agents} agents, but {config.env} has {agents}: ε record "
        f"stays {here.epsilon('record'):.2f}, but {', and '.join(changed)}."
    )


def report(plan: Plan) -> dict[str, Any]:
    """Return ε for each observer, the strongest first, by each accountant, and its inputs."""
    q, noise = plan.mechanism.sampling_rate, plan.noise_multiplier
    claim, claimed_delta = accounting.theorem_1(
        plan.buffer_size, plan.throughput, q, noise, plan.delta
    )
    mechanism, record = plan.mechanism, plan.epsilon("record") if plan.openings else None
    document: dict[str, Any] = {
        **({} if record is None else {"epsilon_record": record}),
        "epsilon_team": plan.epsilon("team"),
        "epsilon_agent": plan.epsilon("agent"),
        "epsilon_teammate": record,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": mechanism.sampling_rate,
        "exposure": plan.exposure,
        "relation": plan.relation,
        "theorem_1_epsilon": claim,
        "theorem_1_delta": claimed_delta,
        "theorem_1_unsound": plan.throughput > 1,  # it is about the agent observer in any case
        "teammate": accounting.teammate(mechanism, record),
    }
    if plan.openings:
        own = ("openings", "opening_noise", "colluders")
        document["epsilon_coalition"] = plan.epsilon("coalition")
        document |= {name: getattr(mechanism, name) for name in own}
    if plan.relation == "zero-out":
        for observer in (*mechanism.observers, *(["coalition"] if plan.openings else [])):
            document[f"epsilon_{observer}_rdp"] = mechanism.epsilon(plan.exposure, observer, "rdp")
    settings = ("buffer_size", "batch_size", "throughput", "agents", "update_every", "steps")
    return document | {name: getattr(plan, name) for name in settings}


def smallest_noise(plan: Plan, target: float, observer: str, held: Collection[str] = ()) -> Plan:
    """Return the plan with the smallest noise whose ε is within the target.

    For the observer `record` both noises count. One of them may be `held` at the plan's value; the
    other is then the smallest that reaches the target. If none is, they are balanced: updates and
    openings, each seen alone, are equally hard to distinguish in the central-limit approximation
    (`_balanced`). The approximation only splits the noise; ε is exact.
    """
    _check_target(plan, target, observer)
    sought = [name for name in noises_of(observer) if name not in held]
    if not sought:
        raise UsageError(
            f"target_epsilon is {target:g}, but all noise that ε {observer} depends on is given; "
            "leave a noise out to find it, or the batch to find the largest."
        )
    if not plan.exposure and "noise_multiplier" in sought:
        plan = dataclasses.replace(plan, noise_multiplier=0.0)
        sought.remove("noise_multiplier")
    if not sought:
        return plan
    if observer == "record":
        _check_held(plan, target, sought)

    def with_noise(noise: float) -> Plan:
        found = {name: noise for name in sought}
        if len(sought) > 1:
            found["opening_noise"] = _balanced(plan, noise)
        return dataclasses.replace(plan, **cast(dict[str, Any], found))

    def cost(noise: float, coarseness: float) -> float:
        return with_noise(noise).epsilon(observer, coarseness)

    return with_noise(least_noise(cost, target))


def noises_of(observer: str) -> tuple[str, ...]:
    """Return the names of the noises that ε of an observer depends on."""
    return NOISES if observer == "record" else NOISES[:1]


def _check_held(plan: Plan, target: float, sought: list[str]) -> None:
    """Refuse a target that noise which is not sought makes impossible, whatever the other is."""
    for name in set(NOISES) - set(sought):
        by_updates = name == "noise_multiplier"
        seen = (plan.exposure, 0) if by_updates else (0, plan.openings)
        alone = plan.mechanism.epsilon(seen[0], "record", "pld", COARSE, seen[1])
        if alone >= target:
            raise UsageError(
                f"target_epsilon is {target:g}, but {name}={getattr(plan, name):g} alone costs "
                f"ε record {alone:.3g}, which leaves nothing for the other noise; raise "
                f"{name}, or leave it out."
            )


def _balanced(plan: Plan, noise_multiplier: float) -> float:
    """Return the noise of openings that are as hard to distinguish as the updates.

    E updates at rate q approach Gaussian differential privacy of μ = q·√(E·(e^(1/σ²) − 1)) (Bu,
    Dong, Long, Su 2020), and n openings have μ = √n/(s/M). The result is rounded up to STEP.
    """
    if not noise_multiplier:
        return 0.0
    growth = math.expm1(min(noise_multiplier**-2, 700.0))
    mu = plan.mechanism.sampling_rate * math.sqrt(max(1, plan.exposure) * growth)
    return round(math.ceil(math.sqrt(plan.openings) / mu / STEP) * STEP, 9)


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
    for tries in itertools.count():
        if cost(steps * STEP, 1.0) <= target:
            break
        steps += 2 ** max(0, tries - 3)  # where more noise hardly helps, take larger steps
    return round(steps * STEP, 9)


def _bisect(accepted: Callable[[float], bool], low: float, high: float) -> float:
    """Return the smallest accepted number above `low`, to within STEP; `high` is accepted."""
    while high - low > STEP / 2:
        middle = (low + high) / 2
        low, high = (low, middle) if accepted(middle) else (middle, high)
    return high


def largest_batch(plan: Plan, target: float, observer: str) -> Plan:
    """Return the plan with the largest expected batch whose ε is within the target."""
    _check_target(plan, target, observer)

    def within(batch: int, coarseness: float = 1.0) -> bool:
        return dataclasses.replace(plan, batch_size=batch).epsilon(observer, coarseness) <= target

    if not within(1):
        least = dataclasses.replace(plan, batch_size=1).epsilon(observer)
        raise UsageError(
            f"target_epsilon is {target:g}, but even a batch of 1 episode costs ε {least:.3g} for "
            f"the {observer} observer; raise the noise multiplier (now {plan.noise_multiplier:g})"
            f"{f', opening_noise (now {plan.opening_noise:g})' if observer == 'record' else ''} "
            "or the target."
        )
    batch = largest_accepted(lambda size: within(size, COARSE), 1, plan.buffer_size + 1)
    while batch < plan.buffer_size and within(batch + 1):
        batch += 1
    return dataclasses.replace(plan, batch_size=batch)


def _check_target(plan: Plan, target: float, observer: str) -> None:
    if not 0 < target < math.inf:
        raise UsageError(f"target_epsilon is {target:g}, but must be a number above 0.")
    if observer not in (known := plan.mechanism.observers):
        why = "" if plan.openings else "No ε holds for a teammate without noised openings."
        raise unknown("observer", observer, known, why)


def draw(plan: Plan, path: Path) -> None:
    """Draw ε of all observers against each noise and the batch size, around a plan."""
    from matplotlib.figure import Figure

    names = NOISES if plan.openings else NOISES[:1]
    figure = Figure(figsize=(4.5 * (1 + len(names)), 3.8), layout="constrained")
    *by_noise, by_batch = figure.subplots(1, 1 + len(names), sharey=True)
    batches = sorted(
        {min(plan.buffer_size, max(1, round(plan.batch_size * 2.0**i))) for i in range(-3, 3)}
    )
    panels: list[tuple[Any, str, list[Any], float]] = []
    for axes, name in zip(by_noise, names, strict=True):
        centre = getattr(plan, name) or 1.0
        panels.append((axes, name, [centre * 2 ** (i / 2) for i in range(-2, 5)], centre))
    panels.append((by_batch, "batch_size", batches, plan.batch_size))
    for axes, name, values, here in panels:
        for observer in plan.mechanism.observers:
            plans = [dataclasses.replace(plan, **{name: value}) for value in values]
            curve = [tried.epsilon(observer, COARSE) for tried in plans]
            label, colour = OBSERVER_LABELS[observer], COLOURS[observer]
            axes.plot(values, curve, color=colour, marker=".", label=label)
        axes.axvline(here, color="0.7", linewidth=1, zorder=0)
        axes.set(xscale="log", yscale="log", xlabel=name)
        axes.grid(alpha=0.3, which="both")
        axes.set_xticks(values)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:.3g}")  # plain numbers render faster
        axes.yaxis.set_major_formatter("{x:g}")
    by_noise[0].set(ylabel=f"ε at δ = {plan.delta:.2g}")
    by_noise[0].legend(frameon=False)
    opened = f", opening noise {plan.opening_noise:g}" if plan.openings else ""
    figure.suptitle(
        f"buffer {plan.buffer_size}, batch {plan.batch_size}, noise {plan.noise_multiplier:g}"
        f"{opened}, "
        f"{plan.agents} agents, {plan.exposure} updates per episode, {plan.relation}"
    )
    figure.savefig(path, dpi=120)
