"""Audit the claimed ε empirically: attack the real program and bound ε from below.

A *trial* trains a small team whose full replay buffer holds empty episodes and, with or without it,
one made-up episode: the canary. The two buffers are neighbours in the sense of docs/privacy.md, and
the worst possible ones, because nothing else moves the gradients. The program is the real one:
sampling, exchange, clipping, noise and optimiser. An attacker who knows the canary and believes the
claim sees every released gradient for as long as an episode is exposed, and scores each trial by
its log-likelihood ratio with and without the canary. Many scores give a lower bound on ε with a
stated confidence. A bound above the accountant's ε refutes the claim.

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
from jax.flatten_util import ravel_pytree

from pevdn import worlds
from pevdn._platform import cache_compilations
from pevdn.agent import replay
from pevdn.agent.learning import Learner
from pevdn.agent.replay import Episode
from pevdn.config import experiment as configuration
from pevdn.config.experiment import Config
from pevdn.config.settings import Settings, number
from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.exchange.alone import alone
from pevdn.privacy import planner
from pevdn.privacy.accounting import OBSERVERS, Mechanism
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import State, each_agent
from pevdn.simulation.team import TeamLayout
from pevdn.training.progress import Reporter, Silent
from pevdn.worlds.base import World
from pevdn.worlds.toy import Coordination

CONFIDENCE = 0.95
REWARD = 1e4  # of the canary: large enough to dominate the team error for any Q-values
LANES = 400  # trials computed side by side,
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
EPSILONS = (1.0, 3.0, 8.0)  # of one agent


@dataclass(frozen=True)
class Bug:
    """A planted bug: the program, or the claim, deviates from the other."""

    about: str
    runs: Callable[[Settings], Mapping[str, Any]] = lambda claimed: {}
    root_n: bool = True  # whether the claim for the team observer accounts for √N


PLANTED: dict[str, Bug] = {
    "no-noise": Bug("no noise is added", lambda s: {"noise_multiplier": 0.0}),
    "no-clipping": Bug(
        "the noise is as claimed, but gradients may be 1,000 times larger",
        lambda s: {"clip_norm": s.clip_norm * 1e3, "noise_multiplier": s.noise_multiplier / 1e3},
    ),
    "hidden-rate": Bug(
        "episodes are sampled twice as often as claimed",
        lambda s: {"expected_batch_size": 2 * s.expected_batch_size},
    ),
    "no-root-n": Bug("the claim for the team observer lacks √N", root_n=False),
}


class Scores(NamedTuple):
    """Log-likelihood ratios of trials (S,) with and without the canary, by observer."""

    agent: Array
    team: Array


class Row(NamedTuple):
    """A claim and the result of its audit."""

    observer: str
    noise_multiplier: float
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
) -> dict[str, Any]:
    """Audit the ε of a recipe for the team observer and its figures for the agent observer.

    `settings` is the recipe, as for training. `scaled` overrides some of its settings, and SMALL
    provides those it does not name. `delta` defaults to the recipe's, or buffer_size^−1.1: a trial
    has no more episodes than its buffer. With a noise multiplier in the settings its ε is the
    claim; otherwise the noise is chosen for these `epsilons` of the agent observer. `trials` counts
    those with the canary; as many run without. All bounds of the document hold simultaneously with
    its confidence.
    """
    chosen = {**SMALL, **(settings or {}), **(scaled or {})}
    trials = number("trials", trials, int, 100, 1_000_000)
    if epsilons is not None and "noise_multiplier" in chosen:
        raise UsageError("noise_multiplier is set and determines ε; leave out epsilon.")
    targets = [number("epsilon", e, float, 0.01, 100.0) for e in epsilons or EPSILONS]
    if delta is not None and not 0 < delta <= 0.5:
        raise UsageError(f"delta is {delta:g}, but must be above 0 and at most 0.5.")
    if plant is not None and plant not in PLANTED:
        raise unknown("planted bug", plant, PLANTED)
    bug = PLANTED[plant] if plant else Bug("nothing")
    show = reporter or Silent()
    cache_compilations()
    n_agents = len(world.agents)

    def configured(values: Mapping[str, Any], **changes: Any) -> Config:
        return configuration.make("pe-vdn-c", world.name, seed=seed, settings={**values, **changes})

    base, rows = configured(chosen, **ALWAYS, **({} if delta is None else {"delta": delta})), []
    if base.settings.delta == 0:
        base = configured(chosen, **ALWAYS, delta=min(0.5, base.settings.buffer_size**-1.1))
    changed = substituted(configured(settings or {}).settings, base.settings)
    values = dataclasses.asdict(base.settings)
    plan = planner.Plan.of(base, n_agents)
    if "noise_multiplier" in chosen:
        if plan.noise_multiplier == 0:
            raise UsageError("noise_multiplier is 0, which claims no ε to audit; raise it.")
        noises = [plan.noise_multiplier]
    else:
        noises = [planner.smallest_noise(plan, e, "agent").noise_multiplier for e in targets]
    significance = (1 - CONFIDENCE) / (len(OBSERVERS) * len(noises))
    bound = partial(lower_bound, significance=significance, delta=base.delta, seed=seed)
    fresh = jax.jit(Simulation(world, base).start, compiler_options=QUICK)(jnp.array([seed]))
    for noise in noises:
        claim = configured(values, noise_multiplier=noise)
        real = configured(values, **{"noise_multiplier": noise, **bug.runs(claim.settings)})
        mechanism = Mechanism(
            claim.sampling_rate, noise, n_agents if bug.root_n else 1, claim.delta
        )
        show.note(
            f"ε team {mechanism.epsilon(plan.exposure, 'team'):.2f}, agent "
            f"{mechanism.epsilon(plan.exposure, 'agent'):.2f} at noise multiplier {noise:g}: "
            f"compiling, then {trials:,} trials with the canary and {trials:,} without, of "
            f"{plan.exposure} updates"
        )
        sim = Watched(world, real)
        exposure, with_it, without = _scores(sim, claim, fresh, plan.exposure, trials, seed)
        for who in OBSERVERS:
            claimed = mechanism.epsilon(exposure, who)
            held_in, held_out = getattr(with_it, who), getattr(without, who)
            least = bound(held_in, held_out)
            auc = area_under_curve(held_in, held_out)
            rows.append(Row(who, noise, claimed, least, auc, least <= claimed))
    return {
        "env": world.name,
        "agents": n_agents,
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


def substituted(recipe: Settings, audited: Settings) -> dict[str, dict[str, Any]]:
    """Return the settings that differ from the recipe's, except δ and noise, which rows report."""
    own, used = dataclasses.asdict(recipe), dataclasses.asdict(audited)
    return {
        name: {"recipe": own[name], "audited": used[name]}
        for name in own
        if name not in ("delta", "noise_multiplier") and own[name] != used[name]
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
    """Return the exposure the program counted, and scores (trials,) with and without the canary."""
    size = sim.settings.buffer_size
    fit = MEMORY // sum(leaf.nbytes for leaf in jax.tree.leaves(fresh))
    lanes = min(LANES, 2 * trials, max(2, fit - fit % 2))
    calls = -(-2 * trials // lanes)
    slots = np.random.default_rng(seed).integers(0, size, (calls, lanes))
    slots[:, 1::2] = size  # every other lane has no canary
    canary = make_canary(sim.world, seed)
    run = jax.jit(partial(attack, sim, claim), compiler_options=QUICK)
    parts = []
    for key, slot in zip(jax.random.split(jax.random.key(seed), calls), slots, strict=True):
        keys = jax.random.split(key, (updates, lanes, 4))
        scores, state = run(fresh, canary, keys, jnp.asarray(slot))
        parts.append(jax.tree.map(np.asarray, scores))
    together = jax.tree.map(lambda *each: np.concatenate(each), *parts)
    with_it, without = (jax.tree.map(lambda x, k=k: x[k::2][:trials], together) for k in (0, 1))
    return int(state.exposure.max()), with_it, without


# ---- the attack -----------------------------------------------------------------------------


def believed(world: World, claim: Config) -> Simulation:
    """Return the claimed program as the attacker runs it, for each agent by itself.

    An agent's own parameters are enough: the canary's reward dominates all messages.
    """
    simulation = Simulation(world, claim)
    simulation.exchange = alone
    return simulation


def added(
    simulation: Simulation, learners: tuple[Learner, ...], canary: Sequence[Episode]
) -> list[Array]:
    """Return what the canary (S, N, ...) adds to each agent's sum of gradients, (S, N, P)."""
    S = canary[0].length.shape[0]
    one = jax.tree.map(lambda x: x[:, :, None], tuple(canary))
    batches = tuple(each_agent(replay.time_first)(episodes) for episodes in one)
    total, _ = simulation.sum_batch(learners, batches, jnp.zeros((S, 1), bool), jnp.zeros(S))
    return [vectors(gradient) for gradient in simulation.release.as_floats(total)]


def vectors(gradient: Any) -> Array:
    """Flatten gradients (S, N, ...) to (S, N, P)."""
    flat: Array = each_agent(lambda one: ravel_pytree(one)[0])(gradient)
    return flat


def evidence(released: Array, v: Array, claimed: Settings) -> Array:
    """Return log N(s; v, σ²C²) − log N(s; 0, σ²C²) of an agent's released sum s, last axis.

    v is the canary's clipped gradient. Only this agent's data is used.
    """
    return ((2 * released - v) * v).sum(-1) / (
        2 * (claimed.noise_multiplier * claimed.clip_norm) ** 2
    )


def log_likelihood_ratio(evidence: Array, q: float) -> Array:
    """Return log(1 − q + q·e^evidence): the canary is in the buffer and sampled with rate q."""
    return jnp.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + evidence)


def score(
    simulation: Simulation,
    learners: tuple[Learner, ...],
    canary: Sequence[Episode],
    released: Sequence[Array],
) -> Scores:
    """Return one update's contribution to the scores, from the agents' data by kind (S, N, ...).

    The agent observer sees the first agent of the team. The team observer sees all agents, whose
    noise is independent but which sample the canary together or not at all.
    """
    by_kind = [
        evidence(seen, v, simulation.settings)
        for seen, v in zip(released, added(simulation, learners, canary), strict=True)
    ]
    first, *others = simulation.team.by_agent(by_kind, axis=1)  # (S,) each
    ratio = partial(log_likelihood_ratio, q=simulation.config.sampling_rate)
    return Scores(ratio(first), ratio(sum(others, start=first)))


class Watched(Simulation):
    """The unchanged simulation, which also exposes what its newest update released."""

    released: tuple[Any, ...]  # by kind, (S, N, ...)

    def gradients(self, state: State, keys: Array) -> tuple[tuple[Any, ...], Array]:
        self.released, refused = super().gradients(state, keys)
        return self.released, refused


def make_canary(world: World, seed: int) -> list[Episode]:
    """Return each agent's record of one episode of full length with very large rewards."""
    rng, T = np.random.default_rng(seed), world.max_steps
    return [
        Episode(
            observations=jnp.asarray(rng.normal(size=(T + 1, spec.observation_size)), jnp.float32),
            available=jnp.ones((T + 1, spec.n_actions), bool),
            actions=jnp.asarray(rng.integers(0, spec.n_actions, T), jnp.int16),
            rewards=jnp.full(T, REWARD),
            terminal=jnp.zeros(T, bool),
            length=jnp.int32(T),
        )
        for spec in world.agents
    ]


def by_kind(team: TeamLayout, canary: Sequence[Episode], lanes: int) -> list[Episode]:
    """One record for each agent to (S, N, ...) for each kind."""

    def together(*records: Array) -> Array:
        return jnp.broadcast_to(jnp.stack(records), (lanes, len(records), *records[0].shape))

    return [jax.tree.map(together, *[canary[i] for i in kind.members]) for kind in team.kinds]


def begin(fresh: State, canary: Sequence[Episode], slots: Array) -> State:
    """Copy the team of one lane to S lanes, its buffer full of empty episodes and the canary.

    The canary goes to `slots` (S,); the scratch slot stands for no canary.
    """
    (S,), size = slots.shape, fresh.stored_at.shape[1]
    state: State = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (S, *x.shape[1:])), fresh)
    one = jax.tree.map(lambda x: x[:, :, None], list(canary))
    return state._replace(
        episodes=jnp.full(S, size),
        replays=tuple(
            each_agent(replay.store, 1)(rows, slots[:, None], new)
            for rows, new in zip(state.replays, one, strict=True)
        ),
    )


def attack(
    sim: Watched,
    claim: Config,
    fresh: State,
    canary: Sequence[Episode],
    keys: Array,
    slots: Array,
) -> tuple[Scores, State]:
    """Run S trials of T updates with keys (T, S, 4); the canary has one record per agent.

    `sim` is the program that runs; the attacker believes `claim`. Returns scores and final state.
    """
    (S,) = slots.shape
    records = by_kind(sim.team, canary, S)
    attacker = believed(sim.world, claim)
    divisor = sim.settings.expected_batch_size  # public, and undone here: the sum has noise σC

    def update(carry: tuple[State, Scores], keys: Array) -> tuple[tuple[State, Scores], None]:
        before, total = carry
        after = sim.update(before, keys, jnp.ones(S, bool))
        released = [divisor * vectors(gradient) for gradient in sim.released]
        seen = score(attacker, before.learners, records, released)
        return (after, jax.tree.map(jnp.add, total, seen)), None

    start = (begin(fresh, records, slots), Scores(jnp.zeros(S), jnp.zeros(S)))
    (state, scores), _ = jax.lax.scan(update, start, keys)
    return scores, state
