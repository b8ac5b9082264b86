"""Membership inference: tell from trained Q-values whether an episode was used for training.

Shadow teams are trained from scratch by the program's own update on a buffer of candidate episodes,
of which a fair coin per team and episode has emptied about half. The attacker infers whether an
episode was emptied, which is the neighbouring relation that ε is about (docs/privacy.md). The coins
are independent, so the teams are too, guessing has an expected AUC of exactly 0.5, and no test has
a larger AUC than `largest_auc` of the team's ε.

The attacker knows all candidates. Episodes used for training have a lower error. The other teams
show how hard a candidate is, and the score corrects for it (Watson et al. 2022, "difficulty
calibration"; with so few teams the likelihood ratios of LiRA did no better, and need the coins).

Two observers: of one agent, whose error is (r / N + m_i)², computed from that agent's parameters
and records alone; and of the whole team, whose error is (r + Σ m_i)².

Shapes: S shadow teams (lanes), N agents, E candidates, T steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn.agent import learning, replay
from pevdn.agent.learning import Learner
from pevdn.agent.replay import Episode
from pevdn.config import experiment as configuration
from pevdn.config.experiment import Config
from pevdn.errors import PevdnError
from pevdn.exchange.secret_shared import Code
from pevdn.privacy import accounting, planner
from pevdn.privacy.accounting import Mechanism
from pevdn.privacy.planner import least_noise
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import State
from pevdn.verification.attacks.statistics import Bools, Estimate, Floats, estimate, largest_auc
from pevdn.verification.attacks.target import messages
from pevdn.worlds.base import World

CANDIDATES = 32  # episodes
BATCH = 8  # expected number of episodes in a minibatch
DELTAS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)  # at which (ε, δ) bounds the AUC
EPSILONS = (math.inf, 30.0, 8.0, 1.0)  # of one agent


class Shadows(Simulation):
    """A simulation compiled for the length of the longest candidate."""

    def __init__(self, world: World, config: Config, longest: int) -> None:
        super().__init__(world, config)
        self.horizons = [min(steps for steps in self.horizons if steps >= longest)]


class Errors(NamedTuple):
    """The trained teams' errors on the candidates, averaged along each episode."""

    agent: Floats  # (S, N, E)
    team: Floats  # (S, E)


def shadow_config(config: Config, private: bool, noise: float, candidates: int) -> Config:
    """Return the run's settings with a buffer of all candidates, as pe-vdn-c or pe-vdn-b."""
    settings = dataclasses.replace(
        config.settings,
        buffer_size=candidates,
        expected_batch_size=max(1, candidates * BATCH // CANDIDATES),
        learning_starts=0,
        update_every=1,
        parallel_episodes=1,
        noise_multiplier=noise,
        delta=config.delta,
        relation="zero-out",
        epsilon_budget=0.0,
        anchor=False,
    )
    name = "pe-vdn-c" if private else "pe-vdn-b"
    return configuration.make(name, config.env, config.steps, settings=dataclasses.asdict(settings))


def noise_for(epsilon: float, updates: int, sampling_rate: float, delta: float) -> float:
    """Return the smallest noise multiplier that keeps `updates` updates within ε."""
    if epsilon == math.inf:
        return 0.0

    def cost(noise: float, coarseness: float) -> float:
        return accounting.epsilon(updates, sampling_rate, noise, delta, coarseness=coarseness)

    return least_noise(cost, epsilon)


def toss(teams: int, candidates: int, seed: int) -> Bools:
    """Return whether each team trains on each candidate, (S, E)."""
    return np.random.default_rng(seed).random((teams, candidates)) < 0.5


def train(
    world: World,
    config: Config,
    episodes: Sequence[Episode],
    member: Bools,
    updates: int,
    seed: int,
) -> Errors:
    """Train a team per lane on its members (S, E) and return its errors on all candidates.

    `episodes` are the candidates by agent, (E, T, ...).
    """
    simulation = Shadows(world, config, int(episodes[0].length.max()))
    (steps,) = simulation.horizons
    candidates = _by_kind(simulation, [replay.shorten(own, steps) for own in episodes])
    lanes = jnp.arange(len(member))

    @jax.jit
    def begin(candidates: tuple[Episode, ...], member: Array) -> State:
        return _filled(simulation.start(lanes + seed), candidates, member)

    @jax.jit
    def some_updates(state: State, first: Array, count: Array) -> State:
        def update(i: Array, state: State) -> State:
            step = jax.random.fold_in(jax.random.key(seed), first + i)
            keys = jax.vmap(lambda key: jax.random.split(key, 4))(
                jax.random.split(step, len(lanes))
            )
            return simulation.update(state, keys, jnp.ones(len(lanes), bool))

        after: State = jax.lax.fori_loop(0, count, update, state)
        return after

    # Short blocking calls: Ctrl-C works between them, and queued calls have deadlocked XLA's two
    # threads on a machine with two cores.
    state = jax.block_until_ready(begin(candidates, jnp.asarray(member)))
    for first in range(0, updates, 20):
        count = min(20, updates - first)
        state = jax.block_until_ready(some_updates(state, jnp.int32(first), jnp.int32(count)))
    worst = float(np.max(state.refused))
    if worst > 0:
        code = Code(config.settings.precision, config.settings.modulus)
        what = f"a message of size {worst:g} of a shadow team"
        raise PevdnError(f"{code.misfit(len(simulation.team), what)}; lower --updates.")
    errors = jax.jit(partial(_errors, simulation))(state.learners, candidates)
    return Errors(*(np.asarray(error, np.float64) for error in errors))


def _by_kind(simulation: Simulation, episodes: Sequence[Episode]) -> tuple[Episode, ...]:
    """Group candidates by kind, (N, E, T, ...)."""
    return tuple(
        jax.tree.map(lambda *own: jnp.stack(own), *[episodes[i] for i in kind.members])
        for kind in simulation.team.kinds
    )


def _filled(state: State, candidates: tuple[Episode, ...], member: Array) -> State:
    """Fill every team's buffer with all candidates, and empty those that are not members."""
    S, E = member.shape

    def rows(episodes: Episode) -> Episode:
        scratch = jax.tree.map(lambda x: jnp.zeros_like(x[:, :1]), episodes)
        full = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), episodes, scratch)
        copies: Episode = jax.tree.map(lambda x: jnp.broadcast_to(x, (S, *x.shape)), full)
        kept = jnp.concatenate([member, jnp.zeros((S, 1), bool)], axis=1)[:, None]
        return copies._replace(length=jnp.where(kept, copies.length, 0))

    return state._replace(
        replays=tuple(rows(episodes) for episodes in candidates),
        episodes=jnp.full(S, E, jnp.int32),
    )


def _errors(
    simulation: Simulation, learners: tuple[Learner, ...], candidates: tuple[Episode, ...]
) -> tuple[Array, Array]:
    S, n = jax.tree.leaves(learners)[0].shape[0], len(simulation.team)
    by_team = jax.tree.map(lambda x: jnp.broadcast_to(x, (S, *x.shape)), candidates)
    m = messages(simulation, learners, by_team)  # (S, N, E, T)
    team: Episode = jax.tree.map(lambda x: x[0], candidates[0])  # the team shares reward and length
    batch = replay.time_first(team)
    rate = simulation.settings.gamma * simulation.settings.return_lambda
    rewards = learning.team_error(jnp.zeros_like(batch.rewards), batch, rate).T  # (E, T)
    played = learning.valid(batch).T

    def mean(error: Array) -> Array:
        return jnp.sum(error**2 * played, axis=-1) / jnp.maximum(team.length, 1)

    return mean(rewards / n + m), mean(rewards + m.sum(1))


def scores(errors: Floats) -> Floats:
    """Return how much lower each team's log error (S, E) is than that of the other teams.

    Each team's mean, which only measures its training, is subtracted first. No coin is used.
    """
    x = np.log(errors + 1e-12)
    x = x - x.mean(axis=1, keepdims=True)
    others: Floats = (x.sum(axis=0) - x) / (len(x) - 1)
    return others - x


def infer(errors: Floats, member: Bools) -> Estimate:
    """Estimate the AUC of inferring membership (S, E) from errors (S, N, E), agent by agent."""
    S, N, E = errors.shape
    by_agent = np.stack([scores(errors[:, i]) for i in range(N)], axis=1)
    repeated = np.broadcast_to(member[:, None], by_agent.shape)
    return estimate(by_agent.ravel(), repeated.ravel(), np.repeat(np.arange(S), N * E))


class Training(NamedTuple):
    """A configuration of shadow teams."""

    noise_multiplier: float | None  # None: pe-vdn-b
    own: str | None = None  # taken from the attacked run: "noise" or "ε"


def trainings(config: Config, agents: int, updates: int, sampling_rate: float) -> list[Training]:
    """Return pe-vdn-b, pe-vdn-c at each ε, and a private run's own noise and own ε agent."""

    def at(epsilon: float) -> float:
        return noise_for(epsilon, updates, sampling_rate, config.delta)

    ways = [Training(None), *(Training(at(epsilon)) for epsilon in EPSILONS)]
    epsilon = planner.Plan.of(config, agents).epsilon("agent") if config.private else 0.0
    if 0 < epsilon < math.inf:
        ways.append(Training(config.settings.noise_multiplier, "noise"))
        ways.append(Training(at(epsilon), "ε agent"))
    return ways


class Inference(NamedTuple):
    """The result of one training attacked by one observer."""

    algorithm: str
    own: str | None
    observer: str  # "agent" or "team"
    noise_multiplier: float | None
    epsilon_agent: float | None
    epsilon_team: float | None
    largest_auc: float  # that the team's ε allows
    estimate: Estimate


def attack(
    world: World,
    config: Config,
    episodes: Sequence[Episode],
    member: Bools,
    updates: int,
    seed: int,
    note: Callable[[str], None],
) -> list[Inference]:
    """Train shadow teams in every configuration and attack each as both observers."""
    (S, E), n = member.shape, len(world.agents)
    q, delta = shadow_config(config, True, 0.0, E).sampling_rate, config.delta
    inferences = []
    ways = trainings(config, n, updates, q)
    for number, (noise, own) in enumerate(ways, start=1):
        shadow = shadow_config(config, noise is not None, noise or 0.0, E)
        agent, team, limit = None, None, 1.0
        if noise is not None:
            mechanism = Mechanism(q, noise, n, delta)
            agent, team = (mechanism.epsilon(updates, who) for who in ("agent", "team"))
            at = (mechanism._replace(delta=d) for d in DELTAS)
            limit = largest_auc((other.epsilon(updates, "team"), other.delta) for other in at)
        goal = "" if team is None else f" at ε team {team:.3g}"
        whose = f", this run's {own}" if own else ""
        note(
            f"training {S} shadow teams of {shadow.algorithm}{goal}{whose}, {updates} updates "
            f"({number}/{len(ways)}) …"
        )
        errors = train(world, shadow, episodes, member, updates, seed)
        for observer, error in (("agent", errors.agent), ("team", errors.team[:, None])):
            result = infer(error, member)
            inferences.append(
                Inference(shadow.algorithm, own, observer, noise, agent, team, limit, result)
            )
    return inferences
