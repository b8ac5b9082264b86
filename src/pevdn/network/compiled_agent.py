"""The agent program, compiled for one agent, and applied to a minibatch part by part.

It keeps no state. Every argument is the agent's own or public.

Shapes: E episodes side by side, T steps, B episodes of a part of a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn.agent import minibatch, networks
from pevdn.agent.learning import Learner, Memo
from pevdn.agent.networks import Parameters
from pevdn.agent.packed_replay import PackedReplay
from pevdn.agent.program import AgentProgram
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.exchange.secret_shared import Code, decode, encode, fits, saturate
from pevdn.privacy.mechanism import NoisedOpening, release_for
from pevdn.worlds.interface import AgentSpec


class Part(NamedTuple):
    """Episodes of a minibatch that are computed side by side."""

    batch: Episode  # (T, B, ...)
    padding: np.ndarray  # (B,) bool: not an episode
    valid: np.ndarray  # (T, B) bool: a step that was played
    memo: Memo  # turns the team error into a gradient


class Messages(NamedTuple):
    """An agent's messages for a minibatch, and what it keeps until their sum is opened."""

    parts: list[Part]
    words: np.ndarray  # uint32: the encoded messages of all valid steps, in order
    fit: bool  # whether all fit into the encoding; with DP they are saturated


class Offer(NamedTuple):
    """What an agent enters into an opening of a block, and keeps until the sum is opened."""

    slots: np.ndarray  # (E,) of the block's episodes
    batch: Episode  # (T, E, ...)
    valid: np.ndarray  # (T, E) bool: a step that was played
    own: np.ndarray  # (T, E) whole units: what it subtracts from the opened sum
    words: np.ndarray  # uint32: the clipped and noised messages of all valid steps, in order


class Offers(NamedTuple):
    """An agent's part of an opening of one or more blocks."""

    blocks: list[Offer]
    words: np.ndarray  # of all blocks


class CompiledAgent:
    """One agent's compiled program."""

    def __init__(self, config: Config, spec: AgentSpec, n_agents: int, max_steps: int) -> None:
        s = config.settings
        self.spec, self.n_agents, self._private = spec, n_agents, config.private
        self.code = Code(s.precision, s.modulus).checked(n_agents)
        self.release = release_for(config)
        self.opening = NoisedOpening.of(s, n_agents) if config.noised else None
        self.program = AgentProgram.of(config, self.release, self.opening)
        self._horizons, self._part = minibatch.horizons(max_steps), minibatch.part_size(config)
        self._act, self._update = jax.jit(self.program.act), jax.jit(self.program.update)
        self._choose, self._encode = jax.jit(self._chosen), jax.jit(self._encoded)
        self._gradient, self._alone = jax.jit(self._decoded_gradient), jax.jit(self._own_gradient)
        self._offer, self._opened = jax.jit(self._offered), jax.jit(self.program.opened)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))

    def begin(self, key: Array) -> Learner:
        return self.program.begin(key, self.spec)

    # ---- act ----------------------------------------------------------------------------------

    def initial_memory(self, params: Parameters, episodes: int) -> Array:
        return networks.of(params).initial_memory(params, episodes)

    def act(
        self,
        params: Parameters,
        memory: Array,
        observations: np.ndarray,
        available: np.ndarray,
        last: np.ndarray,
        chance: np.ndarray,
        epsilon: float,
    ) -> tuple[Array, np.ndarray]:
        """Return the next memory and ε-greedy actions (E,) for observations (E, O)."""
        memory, action = self._act(params, memory, observations, available, last, chance, epsilon)
        return memory, np.asarray(action)

    # ---- update: Algorithm 1 from CHOOSE to UPDATE --------------------------------------------

    def choose(self, words: np.ndarray, filled: int, lengths: np.ndarray) -> np.ndarray:
        """CHOOSE a minibatch from uniform words: slots (parts, B), padded with scratch."""
        slots, parts = self._choose(words, filled, lengths)
        return np.asarray(slots).reshape(-1, self._part)[: int(parts)]

    def messages(self, learner: Learner, replay: PackedReplay, slots: np.ndarray) -> Messages:
        """COMPUTE m_i and ENCODE it for a minibatch (parts, B).

        Only steps that were played get a word: lengths are public in the team, and so is the
        number of words.
        """
        parts, words, fit = [], [np.zeros(0, np.uint32)], True
        for part in slots:
            batch = self._fetch(replay, part)
            encoded, fitting, memo = self._encode(learner.params, learner.target, batch)
            valid = _played(batch)
            parts.append(Part(batch, part == len(replay.length) - 1, valid, memo))
            words.append(np.asarray(encoded)[valid])
            fit &= bool(np.all(np.asarray(fitting)[valid]))
        return Messages(parts, np.concatenate(words), fit)

    def gradient(self, learner: Learner, messages: Messages, total: np.ndarray) -> Parameters:
        """DECODE the opened sum (words) and return the sum of this agent's gradients.

        If private, each episode's gradient is clipped and the sum is in whole units.
        """
        position, gradient = 0, self.release.zeros(learner.params)
        for part in messages.parts:
            count = int(np.count_nonzero(part.valid))
            words = np.zeros(part.valid.shape, np.uint32)
            words[part.valid] = total[position : position + count]
            position += count
            more = self._gradient(learner.params, part.memo, words, part.batch, part.padding)
            gradient = self._add(gradient, more)
        return gradient

    def gradient_alone(
        self, learner: Learner, replay: PackedReplay, slots: np.ndarray
    ) -> Parameters:
        """Return the sum of this agent's gradients over its own minibatch (parts, B).

        What was opened of the episodes stands for the team; each episode's gradient is clipped and
        the sum is in whole units.
        """
        gradient = self.release.zeros(learner.params)
        for part in slots:
            batch, padding = self._fetch(replay, part), part == len(replay.length) - 1
            more = self._alone(learner.params, learner.target, batch, padding)
            gradient = self._add(gradient, more)
        return gradient

    def mean(self, total: Parameters, draw: Callable[[int], np.ndarray]) -> Parameters:
        """Return the gradient to learn from; `draw(P)` gives the noise's words if private."""
        return self.release.mean(total, lambda size: jnp.asarray(draw(size)))

    def update(
        self, learner: Learner, gradient: Parameters, updates: int, env_steps: int, anchored: bool
    ) -> Learner:
        """UPDATE parameters, target network and average."""
        counts = jnp.int32(updates), jnp.int32(env_steps), jnp.bool_(anchored)
        new: Learner = self._update(learner, gradient, *counts)
        return new

    # ---- open the team errors of a block ------------------------------------------------------

    @property
    def max_steps(self) -> int:
        return self._horizons[-1]

    def offer(
        self, learner: Learner, replay: PackedReplay, slots: np.ndarray, noise: np.ndarray
    ) -> Offer:
        """CLIP the shares of the team error of the episodes in slots (E,), and ADD own noise.

        `noise` (T, E, 4, 4) is uniform words. Only steps that were played get a word: lengths are
        public in the team, and so is the number of words.
        """
        batch = self._fetch(replay, slots, self.max_steps)
        encoded, own = self._offer(learner.params, learner.target, batch, noise)
        valid = _played(batch)
        return Offer(slots, batch, valid, np.asarray(own), np.asarray(encoded)[valid])

    def opened(self, offer: Offer, total: np.ndarray) -> np.ndarray:
        """Return what the agent stores of the opened sum (words): (T, E)."""
        words = np.zeros(offer.valid.shape, np.uint32)
        words[offer.valid] = total
        return np.asarray(self._opened(words, offer.own, offer.batch))

    # ---- compiled functions -------------------------------------------------------------------

    def _chosen(self, words: Array, filled: Array, lengths: Array) -> tuple[Array, Array]:
        slots = self.release.sample(words, filled)
        arranged, parts = minibatch.in_parts(
            slots[None], lengths[None], self._horizons, self._part, self._private
        )
        return arranged[0], parts

    def _fetch(self, replay: PackedReplay, slots: np.ndarray, steps: int = 0) -> Episode:
        """Return the episodes (T, B, ...) for the smallest horizon that fits all of them.

        With `steps`, return that many.
        """
        steps = steps or minibatch.horizon_for(replay.length[slots].max(), self._horizons)
        sizes = steps, len(slots), self.opening is not None
        shapes = jax.eval_shape(lambda: minibatch.empty_part(self.spec, *sizes))
        batch: Episode = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        replay.fetch(slots, batch)
        return batch

    def _encoded(
        self, params: Parameters, target: Parameters, batch: Episode
    ) -> tuple[Array, Array, Memo]:
        m, memo = self.program.message(params, target, batch)
        if self._private:
            m = saturate(m, self.code, self.n_agents)
        return encode(m, self.code), fits(m, self.code, self.n_agents), memo

    def _decoded_gradient(
        self, params: Parameters, memo: Memo, words: Array, batch: Episode, padding: Array
    ) -> Parameters:
        return self.program.gradient(params, memo, decode(words, self.code), batch, padding)

    def _own_gradient(
        self, params: Parameters, target: Parameters, batch: Episode, padding: Array
    ) -> Parameters:
        m, memo = self.program.message(params, target, batch)
        return self.program.gradient(params, memo, m, batch, padding)

    def _offered(
        self, params: Parameters, target: Parameters, batch: Episode, noise: Array
    ) -> tuple[Array, Array]:
        offered, own = self.program.offer(params, target, batch, noise)
        assert self.opening is not None
        return self.opening.encode(offered), own


def _played(batch: Episode) -> np.ndarray:
    """Return which steps (T, B) of a batch were played."""
    played: np.ndarray = np.arange(batch.rewards.shape[0])[:, None] < batch.length
    return played
