"""The team under attack: a trained run, the episodes it plays, and the messages it would send."""

from __future__ import annotations

from collections.abc import Iterator
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
from pevdn.simulation.program import Simulation, each_agent
from pevdn.training import world as environment
from pevdn.training.checkpoint import Checkpoints
from pevdn.training.directory import Run
from pevdn.worlds.external import require_jax

BLOCK = 128  # episodes played at a time: the records of large teams are large
EXPLORATION = 0.1


class Scene(NamedTuple):
    """Episodes as they were played: E of them by N agents, T steps at most."""

    episodes: tuple[Episode, ...]  # by agent, (E, T, ...)
    messages: Array  # (N, E, T)
    length: Array  # (E,)


class Target:
    """The team of a run's first seed, as its newest checkpoint has it."""

    def __init__(self, run: Run) -> None:
        self.config = run.config
        world = require_jax(environment.outline(run), "an attack")
        self.simulation = Simulation(world, self.config)
        if len(self.simulation.team) < 2:
            raise UsageError(f"{run.path} trained a single agent, which has no teammate to fear.")
        checkpoints = Checkpoints(run.path, self.config, read_only=True)
        try:
            learners, _ = checkpoints.restore_learners(self.simulation)
        finally:
            checkpoints.close()
        self.learners: tuple[Learner, ...] = jax.tree.map(lambda x: x[:1], learners)
        self.code = Code(self.config.settings.precision, self.config.settings.modulus)
        self._play = jax.jit(self._played)

    def play(self, keys: Array) -> Iterator[Scene]:
        """One episode for each key (E,), in blocks of at most `BLOCK` of them."""
        for first in range(0, len(keys), BLOCK):
            block = keys[first : first + BLOCK]
            full = block[jnp.arange(BLOCK) % len(block)]  # one program for all blocks
            scene: Scene = jax.device_get(self._play(self.learners, full))
            n = len(block)
            yield Scene(
                tuple(jax.tree.map(lambda x, n=n: x[:n], episode) for episode in scene.episodes),
                scene.messages[:, :n],
                scene.length[:n],
            )

    def _played(self, learners: tuple[Learner, ...], keys: Array) -> Scene:
        params = tuple(learner.params for learner in learners)
        exploration = jnp.full(1, EXPLORATION)
        played = self.simulation._play(params, keys[None], exploration, record=True)
        sent = messages(self.simulation, learners, played.episodes)
        team = self.simulation.team
        kinds = [jax.tree.map(lambda x: x[0], episodes) for episodes in played.episodes]
        parts = [team.by_agent(leaves, axis=0) for leaves in zip(*kinds, strict=True)]
        return Scene(
            tuple(Episode(*leaves) for leaves in zip(*parts, strict=True)),
            sent[0],
            played.length[0],
        )


def messages(
    simulation: Simulation, learners: tuple[Learner, ...], episodes: tuple[Episode, ...]
) -> Array:
    """m_i (S, N, E, T) of learners for their episodes, by kind (S, N, E, T, ...).

    The simulation computes them as it does in training, for an exchange that refuses everything
    and so reports all that it was given.
    """
    listening = Simulation(simulation.world, simulation.config)
    listening.exchange = lambda key, sent: Opened(sent, sent)
    batches = tuple(each_agent(replay.time_first)(own) for own in episodes)
    S, _, E = episodes[0].length.shape
    _, sent = listening._learn(learners, batches, jnp.zeros((S, E), bool), jnp.zeros(S))
    return jnp.swapaxes(sent, 2, 3)
