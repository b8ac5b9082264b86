"""Does the program keep what the accountant promises? An attack on it, and the ε that it proves.

A *trial* trains a small team whose full replay buffer holds empty episodes and, or not, one made-up
episode: the canary. These two buffers are neighbours in the sense of docs/privacy.md, and as bad as
neighbours can be, because nothing else moves the gradients. The program is the real one: sampling,
exchange, clipping, noise and optimiser. An attacker who knows the canary and believes the claim
sees every released gradient for as long as an episode is exposed, and scores each trial by how much
more likely it is with the canary than without. Many scores give a lower bound on ε that holds with
a stated confidence. A bound above the accountant's ε refutes the claim.

A bound below it proves nothing: it is what this attack found with so many trials. In the agent view
it attacks an agent's own gradients alone, not what teammates feed back through the team error.

A recipe is audited by its own settings, but for those that are scaled down, which are named.
What runs may differ from what is claimed: `PLANTED` names the mistakes that an audit has to find.

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
from pevdn.simulation.program import Simulation, State, each_agent
from pevdn.simulation.team import TeamLayout
from pevdn.training.progress import Observer, Silent
from pevdn.worlds.base import World

CONFIDENCE = 0.95
REWARD = 1e4  # the canary's: so large that the team error is the reward, whatever agents believe
LANES = 400  # trials computed at once,
MEMORY = 2**30  # or as many as so many bytes hold
QUICK = {"xla_backend_optimization_level": "1"}  # half the compile time, at the same speed
SMALL = {  # where a recipe says nothing: privacy does not depend on the size of the network
    "hidden_size": 1,
    "parallel_episodes": 1,
    "update_every": 1,  # an episode is in the buffer for `buffer_size` updates
    "buffer_size": 32,
    "expected_batch_size": 4,
}
ALWAYS = {  # a trial begins with a full buffer, and asks whether an episode in it is empty
    "learning_starts": 0,
    "relation": "zero-out",
    "epsilon_budget": 0.0,
}
EPSILONS = (1.0, 3.0, 8.0)  # of one agent


@dataclass(frozen=True)
class Bug:
    """A mistake: what the program does, where something else is claimed."""

    about: str
    runs: Callable[[Settings], Mapping[str, Any]] = lambda claimed: {}
    root_n: bool = True  # whether the claim for the team view knows of √N


PLANTED: dict[str, Bug] = {
    "no-noise": Bug("noise is forgotten", lambda s: {"noise_multiplier": 0.0}),
    "no-clipping": Bug(
        "the noise is as claimed, but gradients may be 1,000 times as large",
        lambda s: {"clip_norm": s.clip_norm * 1e3, "noise_multiplier": s.noise_multiplier / 1e3},
    ),
    "hidden-rate": Bug(
        "episodes are sampled twice as often as claimed",
        lambda s: {"expected_batch_size": 2 * s.expected_batch_size},
    ),
    "no-root-n": Bug("the team view is claimed without √N", root_n=False),
}


class Scores(NamedTuple):
    """How much trials (S,) look as if they had had the canary, to either observer."""

    agent: Array
    team: Array


class Row(NamedTuple):
    """A claim, and what the attack says of it."""

    view: str
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
    observer: Observer | None = None,
    settings: Mapping[str, Any] | None = None,
    scaled: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Audit the claims of a recipe in the team view, and its figures in the agent view.

    `settings` are the recipe: those of training. `scaled` stand in for some of them, and SMALL for
    those it does not name. `delta` is the recipe's, or buffer_size^−1.1: a trial has no more
    episodes than its buffer. With a noise multiplier among them its ε is the claim; otherwise noise
    is chosen for these `epsilons` of the agent view. `trials` is how many with the canary, and as
    many without. All bounds of the document hold at once with its confidence.
    """
    given = {**SMALL, **(settings or {}), **(scaled or {})}
    trials = number("trials", trials, int, 100, 1_000_000)
    if epsilons is not None and "noise_multiplier" in given:
        raise UsageError("noise_multiplier is given, and ε follows from it; leave out epsilon.")
    targets = [number("epsilon", e, float, 0.01, 100.0) for e in epsilons or EPSILONS]
    if delta is not None and not 0 < delta <= 0.5:
        raise UsageError(f"delta is {delta:g}, but must be above 0 and at most 0.5.")
    if plant is not None and plant not in PLANTED:
        raise unknown("planted bug", plant, PLANTED)
    bug = PLANTED[plant] if plant else Bug("nothing")
    show = observer or Silent()
    cache_compilations()
    n_agents = len(world.agents)

    def made(values: Mapping[str, Any], **changes: Any) -> Config:
        return configuration.make("pe-vdn-c", world.name, seed=seed, settings={**values, **changes})

    base, rows = made(given, **ALWAYS, **({} if delta is None else {"delta": delta})), []
    if base.settings.delta == 0:
        base = made(given, **ALWAYS, delta=min(0.5, base.settings.buffer_size**-1.1))
    differs = instead(made(settings or {}).settings, base.settings)
    chosen = dataclasses.asdict(base.settings)
    plan = planner.Plan.of(base, n_agents)
    if "noise_multiplier" in given:
        if plan.noise_multiplier == 0:
            raise UsageError("noise_multiplier is 0, so that nothing is claimed to be audited.")
        noises = [plan.noise_multiplier]
    else:
        noises = [planner.smallest_noise(plan, e, "agent").noise_multiplier for e in targets]
    significance = (1 - CONFIDENCE) / (len(OBSERVERS) * len(noises))
    bound = partial(lower_bound, significance=significance, delta=base.delta, seed=seed)
    fresh = jax.jit(Simulation(world, base).start, compiler_options=QUICK)(jnp.array([seed]))
    for noise in noises:
        claim = made(chosen, noise_multiplier=noise)
        real = made(chosen, **{"noise_multiplier": noise, **bug.runs(claim.settings)})
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
        for view in OBSERVERS:
            claimed = mechanism.epsilon(exposure, view)
            held_in, held_out = getattr(with_it, view), getattr(without, view)
            found = bound(held_in, held_out)
            auc = area_under_curve(held_in, held_out)
            rows.append(Row(view, noise, claimed, found, auc, found <= claimed))
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
        "settings": chosen,
        "scaled": differs,
        "rows": [row._asdict() for row in rows],
        "passed": all(row.passed for row in rows),
    }


def instead(recipe: Settings, audited: Settings) -> dict[str, dict[str, Any]]:
    """What was audited in place of a recipe's own settings, δ and noise apart: rows have these."""
    wanted, used = dataclasses.asdict(recipe), dataclasses.asdict(audited)
    return {
        name: {"recipe": wanted[name], "audited": used[name]}
        for name in wanted
        if name not in ("delta", "noise_multiplier") and wanted[name] != used[name]
    }


def world_for(env: str, agents: int | None = None) -> World:
    """The world to take the agents from. Only toy:coordination has any number of them, usually 3.

    Nothing is played in it: an audit needs the agents' shapes and the length of an episode.
    """
    from pevdn.worlds.toy import Coordination

    if env == "toy:coordination":
        return Coordination(number("agents", 3 if agents is None else agents, int, 1, 100))
    if agents is not None:
        raise UsageError(
            f"agents is {agents}, but {env} has its own number of them; leave --agents out, or "
            "audit toy:coordination."
        )
    return worlds.make(env)


def refuted(document: Mapping[str, Any]) -> PevdnError | None:
    """What an audit that did not pass has to say."""
    failed = [row for row in document["rows"] if not row["passed"]]
    if not failed:
        return None
    worst = max(failed, key=lambda row: row["epsilon_lower_bound"] - row["epsilon_claimed"])
    others = f" ({len(failed)} claims are false in all)" if len(failed) > 1 else ""
    return PevdnError(
        f"the claim of ε = {worst['epsilon_claimed']:.2f} in the {worst['view']} view is false: "
        f"ε is at least {worst['epsilon_lower_bound']:.2f}{others}."
    )


# ---- statistics -----------------------------------------------------------------------------


def lower_bound(
    held_in: np.ndarray, held_out: np.ndarray, significance: float, delta: float, seed: int
) -> float:
    """An ε that the mechanism exceeds at this δ, but for a chance of `significance` at most.

    The threshold is chosen on 30 % of the trials and the error rates bounded on the rest, for 25
    random splits of which the median counts, at half the significance each: valid for any scores.
    (jax_privacy's default counts only the thresholds that it kept after looking at the scores.)
    Both directions use the same two error rates, so the better one may be taken.
    """
    from jax_privacy.auditing import CanaryScoreAuditor, MultiSplit

    auditor = CanaryScoreAuditor(held_in, held_out)
    splits = MultiSplit(num_samples=25, threshold_estimation_frac=0.3, seed=seed)
    found = auditor.epsilon_clopper_pearson(
        significance, delta, one_sided=False, threshold_strategy=splits
    )
    return float(found)


def area_under_curve(held_in: np.ndarray, held_out: np.ndarray) -> float:
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(held_in, held_out).statistic / (len(held_in) * len(held_out)))


def _scores(
    sim: Watched, claim: Config, fresh: State, updates: int, trials: int, seed: int
) -> tuple[int, Scores, Scores]:
    """The exposure that the program counted, and scores with and without the canary, (trials,)."""
    size = sim.settings.buffer_size
    fit = MEMORY // sum(leaf.nbytes for leaf in jax.tree.leaves(fresh))
    lanes = min(LANES, 2 * trials, max(2, fit - fit % 2))
    rounds = -(-2 * trials // lanes)
    slots = np.random.default_rng(seed).integers(0, size, (rounds, lanes))
    slots[:, 1::2] = size  # every other lane goes without
    canary = make_canary(sim.world, seed)
    run = jax.jit(partial(attack, sim, claim), compiler_options=QUICK)
    found = []
    for own, slot in zip(jax.random.split(jax.random.key(seed), rounds), slots, strict=True):
        keys = jax.random.split(own, (updates, lanes, 4))
        scores, state = run(fresh, canary, keys, jnp.asarray(slot))
        found.append(jax.tree.map(np.asarray, scores))
    every = jax.tree.map(lambda *parts: np.concatenate(parts), *found)
    with_it, without = (jax.tree.map(lambda x, k=k: x[k::2][:trials], every) for k in (0, 1))
    return int(state.exposure.max()), with_it, without


# ---- the attack -----------------------------------------------------------------------------


def believed(world: World, claim: Config) -> Simulation:
    """The claimed program as the attacker runs it, for every agent by itself.

    An agent's own parameters are enough: beside such a reward nobody's message counts.
    """
    simulation = Simulation(world, claim)
    simulation.exchange = alone
    return simulation


def added(
    simulation: Simulation, learners: tuple[Learner, ...], canary: Sequence[Episode]
) -> list[Array]:
    """What the canary (S, N, ...) adds to every agent's sum of gradients: vectors (S, N, P)."""
    S = canary[0].length.shape[0]
    one = jax.tree.map(lambda x: x[:, :, None], tuple(canary))
    batches = tuple(each_agent(replay.time_first)(episodes) for episodes in one)
    found, _ = simulation.sum_batch(learners, batches, jnp.zeros((S, 1), bool), jnp.zeros(S))
    return [vectors(gradient) for gradient in simulation.release.as_floats(found)]


def vectors(gradient: Any) -> Array:
    """Gradients of any shape (S, N, ...) to (S, N, P)."""
    found: Array = each_agent(lambda one: ravel_pytree(one)[0])(gradient)
    return found


def evidence(released: Array, v: Array, claimed: Settings) -> Array:
    """log N(s; v, σ²C²) − log N(s; 0, σ²C²) of an agent's released sum s, along the last axis.

    v is the canary's gradient, clipped. Nothing here belongs to another agent.
    """
    return ((2 * released - v) * v).sum(-1) / (
        2 * (claimed.noise_multiplier * claimed.clip_norm) ** 2
    )


def log_likelihood_ratio(evidence: Array, q: float) -> Array:
    """Of an update with the canary in the buffer, sampled with probability q, to one without."""
    return jnp.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + evidence)


def score(
    simulation: Simulation,
    learners: tuple[Learner, ...],
    canary: Sequence[Episode],
    released: Sequence[Array],
) -> Scores:
    """One update's share of the scores, from what is known of the agents by kind (S, N, ...).

    One observer sees the first agent of the team. The other sees all: they have noise of their
    own, but sampled the canary together or not at all.
    """
    by_kind = [
        evidence(seen, v, simulation.settings)
        for seen, v in zip(released, added(simulation, learners, canary), strict=True)
    ]
    first, *others = simulation.team.by_agent(by_kind, axis=1)  # (S,) each
    ratio = partial(log_likelihood_ratio, q=simulation.config.sampling_rate)
    return Scores(ratio(first), ratio(sum(others, start=first)))


class Watched(Simulation):
    """The simulation as it is; what it released in the newest update can be looked at."""

    released: tuple[Any, ...]  # by kind, (S, N, ...)

    def gradients(self, state: State, keys: Array) -> tuple[tuple[Any, ...], Array]:
        self.released, refused = super().gradients(state, keys)
        return self.released, refused


def make_canary(world: World, seed: int) -> list[Episode]:
    """Every agent's record of one episode of full length and enormous rewards."""
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
    """A team of one lane in S lanes, its buffer full of empty episodes but for the canary.

    `slots` (S,) says where it goes; where that is the scratch slot, nothing was planted.
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
    """S trials of T updates, for keys (T, S, 4); the canary, one record an agent, is in `slots`.

    What runs is `sim`; the attacker believes the claim. Also returns how training ended.
    """
    (S,) = slots.shape
    records = by_kind(sim.team, canary, S)
    attacker = believed(sim.world, claim)
    divisor = sim.settings.expected_batch_size  # public, and undone: sums are what has noise σC

    def update(carry: tuple[State, Scores], keys: Array) -> tuple[tuple[State, Scores], None]:
        before, total = carry
        after = sim.update(before, keys, jnp.ones(S, bool))
        released = [divisor * vectors(gradient) for gradient in sim.released]
        seen = score(attacker, before.learners, records, released)
        return (after, jax.tree.map(jnp.add, total, seen)), None

    start = (begin(fresh, records, slots), Scores(jnp.zeros(S), jnp.zeros(S)))
    (state, scores), _ = jax.lax.scan(update, start, keys)
    return scores, state
