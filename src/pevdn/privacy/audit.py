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

What runs may differ from what is claimed: `PLANTED` names the mistakes that an audit has to find.

Shapes: S trials (lanes of one simulation), N agents.
"""

from __future__ import annotations

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
from pevdn.agent import learning, networks, replay
from pevdn.agent.networks import Parameters
from pevdn.agent.replay import Episode
from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.experiment import config as configuration
from pevdn.experiment.config import Config, Settings, number
from pevdn.experiment.progress import Observer, Silent
from pevdn.privacy import planner
from pevdn.privacy.accounting import VIEWS, Mechanism
from pevdn.runtime.simulation import Simulation, State, each_agent
from pevdn.runtime.team import Team
from pevdn.worlds.base import World

CONFIDENCE = 0.95
REWARD = 1e4  # the canary's: so large that the team error is the reward, whatever agents believe
LANES = 400  # trials computed at once
QUICK = {"xla_backend_optimization_level": "1"}  # half the compile time, at the same speed
SMALL = {  # privacy does not depend on the size of the network; products of width 1 are fast
    "hidden_size": 1,
    "parallel_episodes": 1,  # an episode is in the buffer for `buffer_size` updates
    "buffer_size": 32,
    "expected_batch_size": 4,
}


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
    epsilons: Sequence[float] = (1.0, 3.0, 8.0),
    trials: int = 2000,
    delta: float | None = None,
    seed: int = 0,
    plant: str | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Audit claims of `epsilons` in the agent view, and of what each means in the team view.

    `trials` is how many with the canary, and as many without. All bounds of the document hold at
    once with its confidence. `settings` are those of training, and so is the default of `delta`.
    """
    trials = number("trials", trials, int, 100, 1_000_000)
    targets = [number("epsilon", value, float, 0.01, 100.0) for value in epsilons]
    if delta is not None and not 0 < delta <= 0.5:
        raise UsageError(f"delta is {delta:g}, but must be above 0 and at most 0.5.")
    if plant is not None and plant not in PLANTED:
        raise unknown("planted bug", plant, PLANTED)
    bug = PLANTED[plant] if plant else Bug("nothing")
    show = observer or Silent()
    cache_compilations()
    n_agents, significance = len(world.agents), (1 - CONFIDENCE) / (len(VIEWS) * len(targets))

    def made(**changes: Any) -> Config:
        values = {**SMALL, "delta": delta or 0.0, **settings, **changes}
        return configuration.make("pe-vdn-c", world.name, seed=seed, settings=values)

    base, rows = made(), []
    bound = partial(lower_bound, significance=significance, delta=base.delta, seed=seed)
    fresh = jax.jit(Simulation(world, base).start, compiler_options=QUICK)(jnp.array([seed]))
    for target in targets:
        plan = planner.smallest_noise(planner.Plan.of(base, n_agents), target, "agent")
        claim = made(noise_multiplier=plan.noise_multiplier)
        real = made(**{"noise_multiplier": plan.noise_multiplier, **bug.runs(claim.settings)})
        show.note(
            f"ε {target:g} at noise multiplier {plan.noise_multiplier:g}: compiling, then "
            f"{trials:,} trials with the canary and {trials:,} without, of {plan.exposure} updates"
        )
        sim = Watched(world, real)
        exposure, with_it, without = _scores(sim, claim, fresh, plan.exposure, trials, seed)
        mechanism = Mechanism(
            claim.sampling_rate,
            claim.settings.noise_multiplier,
            n_agents if bug.root_n else 1,
            claim.delta,
        )
        for view in VIEWS:
            claimed = mechanism.epsilon(exposure, view)
            held_in, held_out = getattr(with_it, view), getattr(without, view)
            found = bound(held_in, held_out)
            rows.append(
                Row(
                    view,
                    claim.settings.noise_multiplier,
                    claimed,
                    found,
                    area_under_curve(held_in, held_out),
                    found <= claimed,
                )
            )
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
        "rows": [row._asdict() for row in rows],
        "passed": all(row.passed for row in rows),
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
    lanes, size = min(LANES, 2 * trials), sim.settings.buffer_size
    rounds = -(-2 * trials // lanes)
    slots = np.random.default_rng(seed).integers(0, size, (rounds, lanes))
    slots[:, 1::2] = size  # every other lane goes without
    canary = make_canary(sim.world, seed)
    run = jax.jit(partial(attack, sim, claim), compiler_options=QUICK)
    found = []
    for own, slot in zip(jax.random.split(jax.random.key(seed), rounds), slots, strict=True):
        keys = jax.random.split(own, (updates, lanes, 4))
        scores, state = run(fresh, canary, keys, jnp.asarray(slot))
        if float(state.refused.max()) > 0:
            raise PevdnError(
                f"a message of {float(state.refused.max()):g} did not fit into the exchange; lower "
                "precision or raise modulus."
            )
        found.append(jax.tree.map(np.asarray, scores))
    every = jax.tree.map(lambda *parts: np.concatenate(parts), *found)
    with_it, without = (jax.tree.map(lambda x, k=k: x[k::2][:trials], every) for k in (0, 1))
    return int(state.exposure.max()), with_it, without


# ---- the attack -----------------------------------------------------------------------------


def canary_gradient(theta: Parameters, canary: Episode) -> Array:
    """What the canary adds to one agent's sum of gradients before clipping, as a vector (P,).

    That agent's parameters are enough: beside such a reward nobody's message counts.
    """
    inputs = learning.network_inputs(canary)
    memo = learning.Memo(inputs, networks.of(theta).unroll(theta, inputs)[1])
    no_messages = jnp.zeros_like(canary.rewards)
    return ravel_pytree(learning.local_gradient(theta, memo, no_messages, canary))[0]


def evidence(theta: Parameters, canary: Episode, released: Array, claimed: Settings) -> Array:
    """log N(s; v, σ²C²) − log N(s; 0, σ²C²) of one agent's released sum s (P,).

    v is the canary's gradient, clipped. Nothing here belongs to another agent.
    """
    v = canary_gradient(theta, canary)
    v = v * jnp.minimum(1.0, claimed.clip_norm / jnp.linalg.norm(v))
    return (2 * released @ v - v @ v) / (2 * (claimed.noise_multiplier * claimed.clip_norm) ** 2)


def log_likelihood_ratio(evidence: Array, q: float) -> Array:
    """Of an update with the canary in the buffer, sampled with probability q, to one without."""
    return jnp.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + evidence)


def score(
    team: Team,
    params: Sequence[Parameters],
    canary: Sequence[Episode],
    released: Sequence[Array],
    claim: Config,
) -> Scores:
    """One update's share of the scores, from what is known of the agents by kind (S, N, ...).

    One observer sees the first agent of the team. The other sees all: they have noise of their
    own, but sampled the canary together or not at all.
    """
    watch = each_agent(partial(evidence, claimed=claim.settings))
    by_kind = [watch(*args) for args in zip(params, canary, released, strict=True)]
    first, *others = team.by_agent(by_kind, axis=1)  # (S,) each
    ratio = partial(log_likelihood_ratio, q=claim.sampling_rate)
    return Scores(ratio(first), ratio(sum(others, start=first)))


class Watched(Simulation):
    """The simulation as it is; what it released in the newest update can be looked at."""

    released: tuple[Parameters, ...]  # by kind, (S, N, ...)

    def _gradients(self, state: State, keys: Array) -> tuple[tuple[Parameters, ...], Array]:
        self.released, refused = super()._gradients(state, keys)
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


def by_kind(team: Team, canary: Sequence[Episode], lanes: int) -> list[Episode]:
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
    divisor = sim.settings.expected_batch_size  # public, and undone: sums are what has noise σC

    def vector(gradient: Parameters) -> Array:
        return ravel_pytree(gradient)[0] * divisor

    def update(carry: tuple[State, Scores], keys: Array) -> tuple[tuple[State, Scores], None]:
        before, total = carry
        after = sim._update(before, keys, jnp.ones(S, bool))
        seen = score(
            sim.team,
            [learner.params for learner in before.learners],
            records,
            [each_agent(vector)(gradient) for gradient in sim.released],
            claim,
        )
        return (after, jax.tree.map(jnp.add, total, seen)), None

    start = (begin(fresh, records, slots), Scores(jnp.zeros(S), jnp.zeros(S)))
    (state, scores), _ = jax.lax.scan(update, start, keys)
    return scores, state
