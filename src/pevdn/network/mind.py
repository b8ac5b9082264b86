"""What one agent computes: it acts, says m_i, and learns from the team's sum.

The functions are those of `agent/` and `privacy/mechanism`, compiled for one agent by itself. A
mind keeps nothing and knows nothing of any other agent: what it is given is the agent's own, or
public.

Shapes: E episodes side by side, T steps, B episodes of a part of a minibatch, O observation, A
actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn.agent import acting, learning, networks, replay
from pevdn.agent.learning import Learner, Memo
from pevdn.agent.networks import Parameters
from pevdn.agent.packed_replay import PackedReplay
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.exchange.secret_shared import Code, decode, encode, fits, saturate
from pevdn.simulation.program import horizons_for, optimiser_for, part_for, rates_for, release_for
from pevdn.worlds.interface import AgentSpec


class Part(NamedTuple):
    """Some episodes of a minibatch, and what turns their team error into a gradient."""

    batch: Episode  # (T, B, ...)
    padding: np.ndarray  # (B,) bool: not an episode
    valid: np.ndarray  # (T, B) bool: a step that was played
    memo: Memo


class Thought(NamedTuple):
    """What is kept of a minibatch between saying m_i and hearing the sum."""

    parts: list[Part]
    words: np.ndarray  # uint32: the encoded messages of all valid steps, in order
    fits: bool  # whether all messages fit into the encoding; with DP they are made to


class Mind:
    """One agent's programs."""

    def __init__(self, config: Config, spec: AgentSpec, n_agents: int, max_steps: int) -> None:
        s = config.settings
        self.config, self.spec = config, spec
        self.code, self._agents = Code(s.precision, s.modulus).checked(n_agents), n_agents
        self.mechanism = release_for(config)
        self.optimiser = optimiser_for(config)
        self._horizons, self._part = horizons_for(max_steps), part_for(config)
        self._act, self._say = jax.jit(_choose), jax.jit(self._message)
        self._learn, self._improve = jax.jit(self._gradient), jax.jit(self._improved)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))

    def begin(self, key: Array) -> Learner:
        """A fresh agent."""
        s = self.config.settings
        params = networks.initialise(s.network, key, self.spec, s.hidden_size)
        return learning.begin(params, self.optimiser)

    # ---- acting ---------------------------------------------------------------------------

    def memory(self, params: Parameters, episodes: int) -> Array:
        return networks.of(params).initial_memory(params, episodes)

    def act(
        self,
        params: Parameters,
        memory: Array,
        seen: np.ndarray,
        available: np.ndarray,
        last: np.ndarray,
        chance: np.ndarray,
        epsilon: float,
    ) -> tuple[Array, np.ndarray]:
        """The next memory, and ε-greedy actions (E,) for what is seen (E, O)."""
        memory, action = self._act(params, memory, seen, available, last, chance, epsilon)
        return memory, np.asarray(action)

    # ---- learning, Algorithm 1 ------------------------------------------------------------

    def think(self, learner: Learner, rows: PackedReplay, slots: np.ndarray) -> Thought:
        """COMPUTE m_i and ENCODE it, for the episodes in the slots, longest first.

        Only steps that were played are said: lengths are public, and so is the number of words.
        """
        parts, said, fitting = [], [np.zeros(0, np.uint32)], True
        for batch, padding in self._parts(rows, slots):
            words, fit, memo = self._say(learner.params, learner.target, batch)
            valid = np.arange(batch.rewards.shape[0])[:, None] < batch.length
            parts.append(Part(batch, padding, valid, memo))
            said.append(np.asarray(words)[valid])
            fitting &= bool(np.all(np.asarray(fit)[valid]))
        return Thought(parts, np.concatenate(said), fitting)

    def gradient(self, learner: Learner, thought: Thought, total: np.ndarray) -> Parameters:
        """From the opened sum (words) to the sum over episodes of this agent's gradient.

        If private, each episode's is clipped, and the sum is in whole units.
        """
        kind = None if self.mechanism is None else jnp.int32
        position, summed = 0, jax.tree.map(lambda x: jnp.zeros_like(x, kind), learner.params)
        for part in thought.parts:
            count = int(np.count_nonzero(part.valid))
            sums = np.zeros(part.valid.shape, np.uint32)
            sums[part.valid] = total[position : position + count]
            position += count
            more = self._learn(learner.params, part.memo, sums, part.batch, part.padding)
            summed = self._add(summed, more)
        return summed

    def release(self, summed: Parameters, draw: Callable[[int], np.ndarray]) -> Parameters:
        """From the sum over a minibatch to the mean; if private, ADD noise.

        `draw(P)` gives the uniform words of this agent's noise in this round.
        """
        released: Parameters
        if self.mechanism is None:
            batch = self.config.settings.expected_batch_size
            released = jax.tree.map(lambda g: g / batch, summed)
        else:
            released = self.mechanism.mean(summed, lambda size: jnp.asarray(draw(size)))
        return released

    def improve(
        self, learner: Learner, gradient: Parameters, updates: int, env_steps: int, pull: float
    ) -> Learner:
        """UPDATE parameters, target network and average."""
        counts = jnp.int32(updates), jnp.int32(env_steps)
        new: Learner = self._improve(learner, gradient, *counts, jnp.float32(pull))
        return new

    # ---- programs -------------------------------------------------------------------------

    def _parts(self, rows: PackedReplay, slots: np.ndarray) -> Iterator[tuple[Episode, np.ndarray]]:
        """Batches with room for the longest of their episodes, and what of them is padding."""
        scratch, groups = len(rows.length) - 1, [slots]
        if self.mechanism is not None:  # as in the simulation, by what each episode needs
            horizon = np.searchsorted(self._horizons, rows.length[slots])
            groups = [slots[horizon == h] for h in range(len(self._horizons))]
        for group in groups:
            for start in range(0, len(group), self._part):
                here = group[start : start + self._part]
                part = np.concatenate([here, np.full(self._part - len(here), scratch)])
                steps = next(h for h in self._horizons if h >= rows.length[part].max())
                batch = self._blank(steps)
                rows.fetch(part, batch)
                yield batch, part == scratch

    def _blank(self, steps: int) -> Episode:
        sizes = (steps, self.spec.observation_size, self.spec.n_actions)
        shapes = jax.eval_shape(lambda: replay.time_first(replay.empty(self._part - 1, *sizes)))
        blank: Episode = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        return blank

    def _message(
        self, params: Parameters, target: Parameters, batch: Episode
    ) -> tuple[Array, Array, Memo]:
        """The encoded messages, whether each of them fits, and what is kept of them."""
        s = self.config.settings
        m, memo = learning.message(params, target, batch, s.gamma, s.double_q, s.return_lambda)
        if self.mechanism is not None:
            m = saturate(m, self.code, self._agents)
        return encode(m, self.code), fits(m, self.code, self._agents), memo

    def _gradient(
        self, params: Parameters, memo: Memo, words: Array, batch: Episode, padding: Array
    ) -> Parameters:
        s = self.config.settings
        rate, total = s.gamma * s.return_lambda, decode(words, self.code)
        if self.mechanism is None:
            return learning.local_gradient(params, memo, total, batch, rate)
        each = learning.local_gradient(params, memo, total, batch, rate, by_episode=True)
        return self.mechanism.clipped_sum(each, padding)

    def _improved(
        self,
        learner: Learner,
        gradient: Parameters,
        updates: Array,
        env_steps: Array,
        pull: Array,
    ) -> Learner:
        s = self.config.settings
        if s.anchor:
            gradient = learning.pull_to_anchor(gradient, learner, pull)
        rates = rates_for(s, updates, env_steps)
        return learning.improve(learner, gradient, self.optimiser, rates)


def _choose(
    params: Parameters,
    memory: Array,
    seen: Array,
    available: Array,
    last: Array,
    chance: Array,
    epsilon: Array,
) -> tuple[Array, Array]:
    memory, q = networks.of(params).step(params, memory, seen, last)
    return memory, acting.epsilon_greedy(chance, q, available, epsilon)
