"""Play episodes with one agent, for training or for an evaluation.

Shapes: E episodes side by side, T steps.
"""

from __future__ import annotations

import hashlib

import numpy as np

from pevdn.agent.networks import Parameters
from pevdn.agent.packed_replay import PackedReplay
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.network import wire_pb2 as wire
from pevdn.network.compiled_agent import CompiledAgent
from pevdn.network.environment import ACTIVE, ENDED, TRUNCATED, WON, Environment, Observation
from pevdn.network.randomness import Randomness
from pevdn.network.status import Status
from pevdn.worlds.recording import EpisodeRecorder
from pevdn.worlds.workers import row_type


class Player:
    """Plays one agent's part of the team's episodes."""

    def __init__(
        self,
        config: Config,
        agent: CompiledAgent,
        environment: Environment,
        randomness: Randomness,
        max_steps: int,
        status: Status,
    ) -> None:
        self._config, self.agent, self.environment = config, agent, environment
        self._randomness, self._max_steps, self._status = randomness, max_steps, status

    async def play_block(
        self, step: int, block: int, params: Parameters, env_steps: int
    ) -> EpisodeRecorder:
        """RUN a block of episodes with the exploration that follows `env_steps` steps."""
        epsilon = self.agent.program.exploration(np.float32(env_steps))  # type: ignore[arg-type]
        E = self._config.block_size
        return await self._play(step, wire.TRAIN, E, block, params, float(epsilon))

    async def evaluate(self, step: int, number: int, params: Parameters) -> EpisodeRecorder:
        """Play greedy episodes; the recorder keeps their scores only."""
        E = self._config.settings.eval_episodes
        return await self._play(step, wire.EVALUATE, E, number, params, 0.0)

    async def _play(
        self,
        step: int,
        purpose: wire.Purpose,
        E: int,
        number: int,
        params: Parameters,
        epsilon: float,
    ) -> EpisodeRecorder:
        agents, training = [self.agent.spec], purpose == wire.TRAIN
        recorder = EpisodeRecorder(agents, E, self._max_steps, training)
        rows, last = np.zeros(E, row_type(agents)), np.full(E, -1, np.int32)
        chance = np.zeros((E, 2), np.float32)
        with self._status.spending("playing"):
            seen = await self.environment.begin(step, purpose, E, number)
            _fill(rows, seen, last)
            recorder.look(np.arange(E), rows)
            memory = self.agent.initial_memory(params, E)
            for t in range(self._max_steps):
                if training:
                    chance = self._randomness.exploration(number, t)
                memory, last = self.agent.act(
                    params, memory, seen.observations, seen.available, last, chance, epsilon
                )
                seen = await self.environment.act(step, t, last)
                active = np.flatnonzero(seen.flags & ACTIVE)
                _fill(rows, seen, last)
                recorder.step(active, rows[active])
                recorder.look(active, rows[active])
                if seen.over:
                    break
        return recorder


def _fill(rows: np.ndarray, seen: Observation, actions: np.ndarray) -> None:
    """Write an observation and the actions before it into rows (E,)."""
    rows["actions"] = actions[:, None]
    rows["observations"], rows["available"] = seen.observations, seen.available
    rows["reward"] = seen.rewards
    for name, bit in (("done", ENDED), ("truncated", TRUNCATED), ("won", WON)):
        rows[name] = seen.flags & bit > 0


def pack(recorder: EpisodeRecorder, agent: CompiledAgent) -> PackedReplay:
    """Return the recorded episodes as the agent stores them."""
    rewards: np.ndarray = np.asarray(agent.program.stored_reward(recorder.rewards))  # type: ignore[arg-type]
    packed = PackedReplay(len(recorder.t))
    for e in range(len(recorder.t)):
        columns = (recorder.observations, recorder.available, recorder.actions[..., 0])
        each = (*columns, rewards, recorder.terminal, recorder.t)
        opened = None if agent.opening is None else np.zeros_like(rewards[e])  # not yet opened
        packed.store(e, Episode(*(column[e] for column in each))._replace(opened=opened))
    return packed


def public_facts(recorder: EpisodeRecorder) -> bytes:
    """Return a digest of what is public about episodes: lengths, rewards and ends."""
    arrays = (recorder.t, recorder.rewards, recorder.terminal)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()
