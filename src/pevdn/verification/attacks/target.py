"""The attacked team: a trained run, the episodes it plays, and the messages it would send."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.agent import replay
from pevdn.agent.learning import Learner
from pevdn.agent.replay import Episode
from pevdn.errors import UsageError
from pevdn.exchange import Opened
from pevdn.exchange.secret_shared import Code
from pevdn.privacy import mechanism
from pevdn.privacy.mechanism import NoisedOpening
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import each_agent
from pevdn.training import world as environment
from pevdn.training.checkpoint import Checkpoints
from pevdn.training.directory import Run
from pevdn.worlds.external import require_jax

BLOCK = 128  # episodes played at a time, which bounds memory for large teams
EXPLORATION = 0.1


class Scene(NamedTuple):
    """E episodes played by N agents, of at most T steps."""

    episodes: tuple[Episode, ...]  # by agent, (E, T, ...)
    messages: Array  # (N, E, T)
    length: Array  # (E,)
    offers: tuple[Array, ...] = ()  # (N, E, T) what agents would enter into noised openings


class Target:
    """The team of a run's first seed in its newest checkpoint."""

    openings: Sequence[NoisedOpening] = ()  # that `play` reports the agents' offers to

    def __init__(self, run: Run) -> None:
        self.config = run.config
        world = require_jax(environment.outline(run), "an attack")
        self.simulation = Simulation(world, self.config)
        if len(self.simulation.team) < 2:
            raise UsageError(
                f"{run.path} has a single agent and no teammate that could attack it; choose a run "
                "with two agents or more."
            )
        checkpoints = Checkpoints(run.path, self.config, read_only=True)
        try:
            learners, _ = checkpoints.restore_learners(self.simulation)
        finally:
            checkpoints.close()
        self.learners: tuple[Learner, ...] = jax.tree.map(lambda x: x[:1], learners)
        self.code = Code(self.config.settings.precision, self.config.settings.modulus)
        self._play = jax.jit(self._played)

    def play(self, keys: Array) -> Iterator[Scene]:
        """Play one episode per key (E,), in blocks of at most `BLOCK` episodes."""
        for first in range(0, len(keys), BLOCK):
            block = keys[first : first + BLOCK]
            full = block[jnp.arange(BLOCK) % len(block)]  # one program for all blocks
            scene: Scene = jax.device_get(self._play(self.learners, full))
            n = len(block)
            yield Scene(
                tuple(jax.tree.map(lambda x, n=n: x[:n], episode) for episode in scene.episodes),
                scene.messages[:, :n],
                scene.length[:n],
                tuple(offered[:, :n] for offered in scene.offers),
            )

    def _played(self, learners: tuple[Learner, ...], keys: Array) -> Scene:
        params = tuple(learner.params for learner in learners)
        exploration = jnp.full(1, EXPLORATION)
        played = self.simulation.player.play(params, keys[None], exploration, record=True)
        sent = messages(self.simulation, learners, played.episodes)
        drawn = [jax.random.fold_in(keys[0], i) for i in range(len(self.openings))]
        entered = [
            offers(self.simulation, learners, played.episodes, opening, key)[0]
            for opening, key in zip(self.openings, drawn, strict=True)
        ]
        own: dict[int, Episode] = {}
        for kind, episodes in zip(self.simulation.team.kinds, played.episodes, strict=True):
            for n, agent in enumerate(kind.members):
                own[agent] = jax.tree.map(lambda x, n=n: x[0, n], episodes)
        return Scene(
            tuple(own[agent] for agent in sorted(own)),
            sent[0],
            played.length[0],
            tuple(entered),
        )


def messages(
    simulation: Simulation, learners: tuple[Learner, ...], episodes: tuple[Episode, ...]
) -> Array:
    """Return the messages m_i (S, N, E, T) of learners for episodes by kind (S, N, E, T, ...).

    The simulation computes them as in training, with an exchange that returns its inputs.
    """
    listening = Simulation(simulation.world, simulation.config)
    listening.exchange = lambda key, sent: Opened(sent, sent)
    batches = tuple(each_agent(replay.time_first)(own) for own in episodes)
    S, _, E = episodes[0].length.shape
    _, sent = listening.sum_batch(learners, batches, jnp.zeros((S, E), bool), jnp.zeros(S))
    return jnp.swapaxes(sent, 2, 3)


def offers(
    simulation: Simulation,
    learners: tuple[Learner, ...],
    episodes: tuple[Episode, ...],
    opening: NoisedOpening,
    key: Array,
) -> Array:
    """Return what agents would enter into a noised opening of episodes, (S, N, E, T), as numbers.

    The program of the agents computes them, with this opening, whatever the algorithm of the run.
    """
    program = dataclasses.replace(simulation.program, opening=opening)
    S, _, _ = episodes[0].length.shape
    keys = jax.random.split(key, (S, len(simulation.team)))

    def offer(key: Array, learner: Learner, own: Episode) -> Array:
        batch = replay.time_first(own)
        words = mechanism.words(key, *batch.rewards.shape)
        entered, _ = program.offer(learner.params, learner.target, batch, words)
        return entered.T * jnp.asarray(opening.unit, jnp.float32)

    team = simulation.team
    by_kind = [
        each_agent(offer)(keys[:, jnp.array(kind.members)], *own)
        for kind, *own in zip(team.kinds, learners, episodes, strict=True)
    ]
    return jnp.stack(team.by_agent(by_kind, axis=1), axis=1)
