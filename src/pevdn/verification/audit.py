"""Audit the claimed ε empirically: attack the real program and bound ε from below.

A *trial* trains a small team whose full replay buffer holds empty episodes and, with or without it,
one made-up episode: the canary. The two buffers are neighbours in the sense of docs/privacy.md, and
the worst possible ones, because nothing else moves the gradients. The program is the real one:
openings, sampling, exchange, clipping, noise and optimiser. An attacker who knows the canary and
believes the claim sees every released gradient for as long as an episode is exposed, and scores
each trial by its log-likelihood ratio with and without the canary. With pe-vdn-d, a coalition of t
teammates also sees every opened sum, and attacks the record of one agent. Many scores give a lower
bound on ε with a stated confidence. A bound above the accountant's ε refutes the claim.

A bound below it proves nothing: it is what this attack found with this number of trials. For the
agent observer the attack uses one agent's own gradients alone, not what teammates feed back through
the team error.

A recipe is audited with its own settings except those that are scaled down, which are reported.
The program may differ from the claim: `PLANTED` names the bugs that an audit must find.

Shapes: S trials (lanes of one simulation), N agents.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn import worlds
from pevdn._platform import cache_compilations
from pevdn.agent.program import AgentProgram
from pevdn.agent.replay import Episode
from pevdn.config import experiment as configuration
from pevdn.config.experiment import Config
from pevdn.config.settings import Settings, number
from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.privacy import planner
from pevdn.privacy.accounting import Mechanism
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import State
from pevdn.training.progress import Reporter, Silent
from pevdn.verification import canary
from pevdn.verification.canary import Scores, Watched
from pevdn.worlds.base import World
from pevdn.worlds.toy import Coordination

CONFIDENCE = 0.95
LANES = 400  # trials computed side by side,
SUMS = 10  # trials of the opened sums alone for each of the others: they make no updates
MEMORY = 2**30  # or as many as fit into this many bytes
QUICK = {"xla_backend_optimization_level": "1"}  # half the compile time, at the same speed
SMALL = {  # defaults of an audit: privacy does not depend on the size of the network
    "hidden_size": 1,
    "parallel_episodes": 1,
    "update_every": 1,  # an episode is in the buffer for `buffer_size` updates
    "buffer_size": 32,
    "expected_batch_size": 4,
}
ALWAYS = {  # a trial starts with a full buffer, and tests whether one episode in it is empty
    "learning_starts": 0,
    "relation": "zero-out",
    "epsilon_budget": 0.0,
}
EPSILONS = (1.0, 3.0, 8.0)  # of one agent, or of its record
AUDITED = ("pe-vdn-c", "pe-vdn-d")


class CentresWithItsOwnReward(AgentProgram):
    """Centres clipped messages with a reward of its own, as if it were public."""

    def offer(self, params: Any, target: Any, batch: Episode, words: Array) -> tuple[Array, Array]:
        offered, own = super().offer(params, target, batch, words)
        reward = jnp.clip(batch.rewards / self.opening.n_agents, -4.0, 4.0)
        return offered + jnp.trunc(reward / self.opening.unit).astype(jnp.int32), own


@dataclass(frozen=True)
class Bug:
    """A planted bug: the program, or the claim, deviates from the other."""

    about: str
    runs: Callable[[Settings, int], Mapping[str, Any]] = lambda claimed, agents: {}
    program: type[AgentProgram] = AgentProgram
    all_agents: bool = True  # whether the claim for the team observer accounts for all N agents
    algorithms: tuple[str, ...] = ("pe-vdn-c", "pe-vdn-d")


def _noised(about: str, **how: Any) -> Bug:
    return Bug(about, algorithms=("pe-vdn-d",), **how)


PLANTED: dict[str, Bug] = {
    "no-noise": Bug("no noise is added to gradients", lambda s, n: {"noise_multiplier": 0.0}),
    "no-clipping": Bug(
        "the noise is as claimed, but gradients may be 1,000 times larger",
        lambda s, n: {"clip_norm": s.clip_norm * 1e3, "noise_multiplier": s.noise_multiplier / 1e3},
    ),
    "hidden-rate": Bug(
        "episodes are sampled twice as often as claimed",
        lambda s, n: {"expected_batch_size": 2 * s.expected_batch_size},
    ),
    "no-root-n": Bug(
        "the claim for the team observer is that for one agent (pe-vdn-c: lacks √N)",
        all_agents=False,
    ),
    "no-opening-noise": _noised(
        "no noise is added to the sums", runs=lambda s, n: {"opening_noise": 0.0}
    ),
    "small-share": _noised(
        "each agent adds an N-th of the noise's variance, although all others may collude",
        runs=lambda s, n: {"opening_noise": s.opening_noise / math.sqrt(n)},
    ),
    "no-message-clip": _noised(
        "the noise is as claimed, but messages may be 1,000 times larger",
        runs=lambda s, n: {
            "message_norm": s.message_norm * 1e3,
            "opening_noise": s.opening_noise / 1e3,
        },
    ),
    "opened-twice": _noised(
        "episodes are opened twice as often as claimed",
        runs=lambda s, n: {"openings": 2 * s.openings},
    ),
    "private-centre": _noised(
        "an agent adds a reward of its own to its clipped messages, as if it were public",
        program=CentresWithItsOwnReward,
    ),
}


class Row(NamedTuple):
    """A claim and the result of its audit."""

    observer: str
    noise_multiplier: float
    opening_noise: float | None  # pe-vdn-d
    epsilon_claimed: float
    epsilon_lower_bound: float
    auc: float  # probability that a trial with the canary scores above one without
    passed: bool


def audit(
    world: World,
    epsilons: Sequence[float] | None = None,
    trials: int = 2000,
    delta: float | None = None,
    seed: int = 0,
    plant: str | None = None,
    reporter: Reporter | None = None,
    settings: Mapping[str, Any] | None = None,
    scaled: Mapping[str, Any] | None = None,
    algorithm: str = "pe-vdn-c",
) -> dict[str, Any]:
    """Audit the ε of a recipe for every observer of its algorithm.

    `settings` is the recipe, as for training. `scaled` overrides some of its settings, and SMALL
    provides those it does not name. `delta` defaults to the recipe's, or buffer_size^−1.1: a trial
    has no more episodes than its buffer. With a noise multiplier in the settings its ε is the
    claim; otherwise the noise is chosen for these `epsilons`, of the agent observer or, with
    pe-vdn-d, of `record`. `trials` counts those with the canary; as many run without. All bounds of
    the document hold simultaneously with its confidence.
    """
    chosen = {**SMALL, **(settings or {}), **(scaled or {})}
    trials = number("trials", trials, int, 100, 1_000_000)
    if epsilons is not None and "noise_multiplier" in chosen:
        raise UsageError("noise_multiplier is set and determines ε; leave out epsilon.")
    targets = [number("epsilon", e, float, 0.01, 100.0) for e in epsilons or EPSILONS]
    if delta is not None and not 0 < delta <= 0.5:
        raise UsageError(f"delta is {delta:g}, but must be above 0 and at most 0.5.")
    if algorithm not in AUDITED:
        raise unknown("private algorithm", algorithm, AUDITED)
    plantable = {name: bug for name, bug in PLANTED.items() if algorithm in bug.algorithms}
    if plant is not None and plant not in plantable:
        raise unknown(f"planted bug of {algorithm}", plant, plantable)
    bug = PLANTED[plant] if plant else Bug("nothing")
    show = reporter or Silent()
    cache_compilations()
    n_agents = len(world.agents)

    def configured(values: Mapping[str, Any], **changes: Any) -> Config:
        return configuration.make(algorithm, world.name, seed=seed, settings={**values, **changes})

    base, rows = configured(chosen, **ALWAYS, **({} if delta is None else {"delta": delta})), []
    if base.settings.delta == 0:
        base = configured(chosen, **ALWAYS, delta=min(0.5, base.settings.buffer_size**-1.1))
    changed = substituted(configured(settings or {}).settings, base.settings)
    values = dataclasses.asdict(base.settings)
    plan = planner.Plan.of(base, n_agents)
    if "noise_multiplier" in chosen:
        for name in planner.noises_of(plan.mechanism.observers[0]):
            if getattr(plan, name) == 0:
                raise UsageError(f"{name} is 0, which claims no ε to audit; raise it.")
        plans = [plan]
    else:
        whom = "record" if base.noised else "agent"
        plans = [planner.smallest_noise(plan, epsilon, whom) for epsilon in targets]
    observers = plan.mechanism.observers
    if base.noised:
        observers = (*observers, "sums")
    significance = (1 - CONFIDENCE) / (len(observers) * len(plans))
    bound = partial(lower_bound, significance=significance, delta=base.delta, seed=seed)
    fresh = jax.jit(Simulation(world, base).start, compiler_options=QUICK)(jnp.array([seed]))
    for plan in plans:
        noise = {"noise_multiplier": plan.noise_multiplier}
        if base.noised:
            noise["opening_noise"] = plan.opening_noise
        claim = configured(values, **noise)
        real = configured(values, **{**noise, **bug.runs(claim.settings, n_agents)})
        mechanism = plan.mechanism._replace(n_agents=n_agents if bug.all_agents else 1)
        claims = [f"{who} {_claimed(mechanism, plan.exposure, who):.2f}" for who in observers]
        at = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in noise.items())
        show.note(
            f"ε {', '.join(claims)} at {at}: compiling, then {trials:,} trials with the canary and "
            f"{trials:,} without, of {plan.exposure} updates"
        )
        sim = Watched(world, real)
        sim.program = bug.program(sim.program.settings, sim.program.release, sim.program.opening)
        exposure, with_it, without = _scores(sim, claim, fresh, plan.exposure, trials, seed)
        if base.noised:
            sums = _sums(sim, claim, fresh, trials, seed)
            with_it, without = with_it._replace(sums=sums[0]), without._replace(sums=sums[1])
        for who in observers:
            claimed = _claimed(mechanism, exposure, who)
            held_in, held_out = getattr(with_it, who), getattr(without, who)
            least = bound(held_in, held_out)
            auc = area_under_curve(held_in, held_out)
            row = (who, plan.noise_multiplier, noise.get("opening_noise"))
            rows.append(Row(*row, claimed, least, auc, least <= claimed))
    return {
        "algorithm": algorithm,
        "env": world.name,
        "agents": n_agents,
        "colluders": plan.mechanism.colluders if base.noised else None,
        "buffer_size": base.settings.buffer_size,
        "batch_size": base.settings.expected_batch_size,
        "updates": exposure,
        "trials": trials,
        "confidence": CONFIDENCE,
        "largest_possible_bound": bound(np.ones(trials), np.zeros(trials)),
        "delta": base.delta,
        "seed": seed,
        "plant": plant,
        "settings": values,
        "scaled": changed,
        "rows": [row._asdict() for row in rows],
        "passed": all(row.passed for row in rows),
    }


def _claimed(mechanism: Mechanism, exposure: int, observer: str) -> float:
    """Return the ε that is claimed; of sums alone, that of a record that no update uses."""
    if observer == "sums":
        return mechanism.epsilon(0, "record")
    return mechanism.epsilon(exposure, observer)


def substituted(recipe: Settings, audited: Settings) -> dict[str, dict[str, Any]]:
    """Return the settings that differ from the recipe's, except δ and noise, which rows report."""
    own, used = dataclasses.asdict(recipe), dataclasses.asdict(audited)
    return {
        name: {"recipe": own[name], "audited": used[name]}
        for name in own
        if name not in ("delta", *planner.NOISES) and own[name] != used[name]
    }


def world_for(env: str, agents: int | None = None) -> World:
    """Return the world that defines the agents; toy:coordination takes any number (default 3).

    No episode is played in it: an audit needs the agents' shapes and the length of an episode.
    """

    if env == "toy:coordination":
        return Coordination(number("agents", 3 if agents is None else agents, int, 1, 100))
    if agents is not None:
        raise UsageError(
            f"agents is {agents}, but {env} has a fixed number of agents; leave --agents out, or "
            "audit toy:coordination."
        )
    return worlds.make(env)


def refuted(document: Mapping[str, Any]) -> PevdnError | None:
    """Return the error that reports a failed audit, or None if it passed."""
    failed = [row for row in document["rows"] if not row["passed"]]
    if not failed:
        return None
    worst = max(failed, key=lambda row: row["epsilon_lower_bound"] - row["epsilon_claimed"])
    others = f" ({len(failed)} claims are false in all)" if len(failed) > 1 else ""
    return PevdnError(
        f"the claim of ε = {worst['epsilon_claimed']:.2f} for the {worst['observer']} observer is "
        f"false: ε is at least {worst['epsilon_lower_bound']:.2f}{others}."
    )


# ---- statistics -----------------------------------------------------------------------------


def lower_bound(
    held_in: np.ndarray, held_out: np.ndarray, significance: float, delta: float, seed: int
) -> float:
    """Return a lower bound on ε at this δ that is wrong with probability at most `significance`.

    The threshold is chosen on 30 % of the trials and the error rates are bounded on the rest, for
    25 random splits whose median counts, at half the significance each: valid for any scores.
    (jax_privacy's default corrects only for the thresholds it kept after seeing the scores.)
    Both directions use the same two error rates, so the better one may be taken.
    """
    from jax_privacy.auditing import CanaryScoreAuditor, MultiSplit

    auditor = CanaryScoreAuditor(held_in, held_out)
    splits = MultiSplit(num_samples=25, threshold_estimation_frac=0.3, seed=seed)
    bound = auditor.epsilon_clopper_pearson(
        significance, delta, one_sided=False, threshold_strategy=splits
    )
    return float(bound)


def area_under_curve(held_in: np.ndarray, held_out: np.ndarray) -> float:
    """Return the probability that a trial with the canary scores above one without."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(held_in, held_out).statistic / (len(held_in) * len(held_out)))


def _scores(
    sim: Watched, claim: Config, fresh: State, updates: int, trials: int, seed: int
) -> tuple[int, Scores, Scores]:
    """Return the exposure the program counted, and scores (trials,) with and without the canary.

    With pe-vdn-d, the `record` observer compares with trials in which the record of the last agent
    is empty, the others with trials in which the whole episode is.
    """
    noised = sim.config.noised
    ways = 3 if noised else 2  # with the canary, without, and without the record of one agent
    size, agents = sim.settings.buffer_size, len(sim.team)
    fit = MEMORY // sum(leaf.nbytes for leaf in jax.tree.leaves(fresh))
    lanes = max(ways, min(LANES, ways * trials, fit) // ways * ways)
    calls = -(-ways * trials // lanes)
    slots = np.random.default_rng(seed).integers(0, size, (calls, lanes))
    episode = canary.make_canary(sim.world, seed)
    extra: tuple[Array, ...] = ()
    if noised:
        kept = np.ones((lanes, agents), bool)
        kept[1::3], kept[2::3, -1] = False, False
        extra = (jnp.asarray(kept),)
    else:
        slots[:, 1::2] = size  # every other lane has no canary
    trial = canary.attack_noised if noised else canary.attack
    run = jax.jit(partial(trial, sim, claim), compiler_options=QUICK)
    parts = []
    for key, slot in zip(jax.random.split(jax.random.key(seed), calls), slots, strict=True):
        keys = jax.random.split(key, (updates, lanes, 4))
        scores, state = run(fresh, episode, keys, jnp.asarray(slot), *extra)
        parts.append(jax.tree.map(np.asarray, scores))
    together = jax.tree.map(lambda *each: np.concatenate(each), *parts)
    found = [jax.tree.map(lambda x, k=k: x[k::ways][:trials], together) for k in range(ways)]
    with_it, without = found[0], found[1]
    if noised:
        without = without._replace(record=found[2].record)
    return int(state.exposure.max()), with_it, without


def _sums(
    sim: Watched, claim: Config, fresh: State, trials: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of the opened sums alone, with the record of the last agent and without."""
    episode, agents = canary.make_canary(sim.world, seed), len(sim.team)
    lanes = SUMS * LANES
    kept = np.ones((lanes, agents), bool)
    kept[1::2, -1] = False
    run = jax.jit(partial(canary.attack_openings, sim, claim), compiler_options=QUICK)
    calls = -(-2 * SUMS * trials // lanes)
    every = jax.random.split(jax.random.key(seed + 1), (calls, lanes))
    scores = np.stack([np.asarray(run(fresh, episode, keys, jnp.asarray(kept))) for keys in every])
    with_it, without = (scores[:, k::2].ravel()[: SUMS * trials] for k in (0, 1))
    return with_it, without
