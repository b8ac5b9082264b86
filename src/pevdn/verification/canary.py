"""The attack of an audit: trials of the real program, with and without a canary.

A trial starts with a full buffer of empty episodes and one made-up episode, the canary, or without
it. `attack` runs the updates of pe-vdn-c; `attack_noised` runs the openings and updates of pe-vdn-d
and adds the observer `record`: the strongest coalition, which knows all records but one, the noise
of its own members, all parameters and all opened sums. `attack_openings` is its attack on the sums
alone. Scores are log-likelihood ratios of what an
observer sees with and without the canary, computed by an attacker who believes the claim.

Shapes: S trials (lanes of one simulation), N agents, T steps, P parameters of one agent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from pevdn.agent import keys as derive
from pevdn.agent import replay
from pevdn.agent.learning import Learner
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.exchange import modular
from pevdn.exchange.alone import alone
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import State, each_agent
from pevdn.simulation.team import TeamLayout
from pevdn.worlds.base import World

REWARD = 1e4  # of the canary: large enough to dominate the team error for any Q-values


class Scores(NamedTuple):
    """Log-likelihood ratios of trials (S,) with and without the canary, by observer."""

    agent: Any  # arrays of JAX or NumPy
    team: Any
    record: Any = None  # pe-vdn-d
    sums: Any = None  # pe-vdn-d: of the record, from the opened sums alone


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


def evidence(released: Array, v: Array, deviation: float) -> Array:
    """Return log N(y; v, s²) − log N(y; 0, s²) of a released sum y, last axis; s is `deviation`.

    v is the canary's clipped gradient, or its clipped messages.
    """
    return ((2 * released - v) * v).sum(-1) / (2 * deviation**2)


def evidence_by_agent(
    simulation: Simulation,
    learners: tuple[Learner, ...],
    canary: Sequence[Episode],
    released: Sequence[Array],
) -> tuple[Array, ...]:
    """Return one update's evidence from each agent's own released sum, by agent (S,).

    `released` are the agents' sums by kind (S, N, P). Only an agent's own data is used for it.
    """
    claimed = simulation.settings
    deviation = claimed.noise_multiplier * claimed.clip_norm
    by_kind = [
        evidence(seen, v, deviation)
        for seen, v in zip(released, added(simulation, learners, canary), strict=True)
    ]
    return simulation.team.by_agent(by_kind, axis=1)


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
    first, *others = evidence_by_agent(simulation, learners, canary, released)
    ratio = partial(log_likelihood_ratio, q=simulation.config.sampling_rate)
    return Scores(ratio(first), ratio(sum(others, start=first)))


class Watched(Simulation):
    """The unchanged simulation, which also exposes what its newest update and opening released."""

    released: tuple[Any, ...]  # by kind, (S, N, ...)
    heard: tuple[Array, Array]  # all agents' words (S, N, T, E) and their sums modulo p (S, T, E)

    def form_sum(self, keys: Array, words: Array) -> Array:
        total = super().form_sum(keys, words)
        self.heard = words, total
        return total

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


# ---- noised openings ------------------------------------------------------------------------


def attack_noised(
    sim: Watched,
    claim: Config,
    fresh: State,
    canary: Sequence[Episode],
    keys: Array,
    slots: Array,
    kept: Array,
) -> tuple[Scores, State]:
    """Run S trials of openings and U updates with keys (U, S, 4), at the program's own ages.

    `kept` (S, N) says whose records of the canary are not empty. The `record` observer attacks the
    last agent; the first t agents are the coalition. Agents draw their samples by themselves, so
    the ratios of all agents multiply for the `team` observer.
    """
    (S,), team = slots.shape, sim.team
    records = by_kind(team, [r._replace(opened=jnp.zeros_like(r.rewards)) for r in canary], S)
    attacker = believed(sim.world, claim)
    expected = [each_agent(partial(_with_opened, attacker))(record) for record in records]
    ratio = partial(log_likelihood_ratio, q=attacker.config.sampling_rate)
    divisor = sim.settings.expected_batch_size

    def update(carry: tuple[State, Scores], keys: Array) -> tuple[tuple[State, Scores], None]:
        before, total = carry
        after = sim.update(before, keys, jnp.ones(S, bool))
        released = [divisor * vectors(gradient) for gradient in sim.released]
        by_agent = evidence_by_agent(attacker, before.learners, expected, released)
        each = [ratio(found) for found in by_agent]
        seen = Scores(each[0], sum(each[1:], start=each[0]), each[-1])
        return (after, jax.tree.map(jnp.add, total, seen)), None

    state = begin(fresh, _emptied(team, records, kept), slots)
    scores = Scores(*jnp.zeros((3, S)))
    block, due = sim.config.block_size, sim.config.updates_due
    made = [age // block * due for age in sim.ages]  # updates before each opening
    for number, (first, last) in enumerate(zip(made, [*made[1:], len(keys)], strict=True)):
        known = state.learners
        opening_keys = sim.opening_keys(keys[0, :, derive.COIN], number)
        state = sim.open(state, slots[:, None], opening_keys)
        seen = opening_evidence(sim, attacker, known, records)
        scores = scores._replace(record=scores.record + seen)
        (state, scores), _ = jax.lax.scan(update, (state, scores), keys[first:last])
    return scores, state


def attack_openings(
    sim: Watched,
    claim: Config,
    fresh: State,
    canary: Sequence[Episode],
    keys: Array,
    kept: Array,
) -> Array:
    """Return scores (S,) of the sums alone, opened as often as the program does, with keys (S,).

    No update is made in between: the coalition knows all parameters anyway.
    """
    (S,) = keys.shape
    records = by_kind(sim.team, [r._replace(opened=jnp.zeros_like(r.rewards)) for r in canary], S)
    learners = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (S, *x.shape[1:])), fresh.learners)
    attacker, total = believed(sim.world, claim), jnp.zeros(S)

    def as_batch(record: Episode) -> Episode:
        return replay.time_first(record.map(lambda x: x[None]))

    batches = tuple(each_agent(as_batch)(own) for own in _emptied(sim.team, records, kept))
    for number in range(len(sim.ages)):
        sim.opened(learners, batches, *sim.opening_keys(keys, number))
        total = total + opening_evidence(sim, attacker, learners, records)
    return total


def opening_evidence(
    sim: Watched,
    attacker: Simulation,
    learners: tuple[Learner, ...],
    records: Sequence[Episode],
) -> Array:
    """Return the evidence (S,) of the newest opened sum for the record of the last agent.

    The coalition, agents 0 to t − 1, subtracts what its members entered, noise and all, and the
    messages of all others, which it knows, but not their noise.
    """
    real, claimed = sim.opening, attacker.opening
    assert real is not None and claimed is not None
    words, total = sim.heard
    for i in range(claimed.colluders):
        total = modular.add(total, modular.negate(words[:, i], real.modulus), real.modulus)
    seen = real.others(total, jnp.zeros(total.shape, jnp.int32))[..., 0]  # (S, T)

    def clipped(learner: Learner, record: Episode) -> Array:
        batch = replay.time_first(record.map(lambda x: x[None]))
        shares = attacker.program.share_of_error(learner.params, learner.target, batch)
        return claimed.clip(shares[:, 0]) * jnp.asarray(claimed.unit, jnp.float32)

    by_kind = [each_agent(clipped)(*own) for own in zip(learners, records, strict=True)]
    *others, v = sim.team.by_agent(by_kind, axis=1)  # (S, T) each
    for known in others[claimed.colluders :]:
        seen = seen - known
    return evidence(seen, v, claimed.message_norm * claimed.opening_noise)


def _with_opened(attacker: Simulation, record: Episode) -> Episode:
    """Return a record with what the attacker expects its agent to have stored of the opening.

    The public reward alone: it dominates everything else that was opened.
    """
    batch = replay.time_first(record.map(lambda x: x[None]))
    nothing = jnp.zeros(batch.rewards.shape, jnp.int32)
    opened = attacker.program.opened(nothing.astype(jnp.uint32), nothing, batch)
    return record._replace(opened=opened[:, 0])


def _emptied(team: TeamLayout, records: Sequence[Episode], kept: Array) -> list[Episode]:
    """Empty the records (S, N, ...) by kind of the agents that `kept` (S, N) does not name."""

    def empty(record: Episode, keep: Array) -> Episode:
        return record.map(lambda x: jnp.where(keep, x, jnp.zeros_like(x)))

    return [
        each_agent(empty)(own, kept[:, jnp.array(kind.members)])
        for kind, own in zip(team.kinds, records, strict=True)
    ]
