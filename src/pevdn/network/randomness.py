"""All random numbers of a member, and what each is drawn from.

`FromSecret` draws a party's own numbers from its secret, which came from the operating system, and
common minibatches from the seed that all parties made together. If openings are noised, a party's
minibatches are its own, and only the coin that decides about an update is public. `FromSeed`, for
rehearsals, draws everything from one seed with the keys of the simulation, so that the two can be
compared; it hides nothing.

Numbers depend on a step or block, not on the time: a restarted party draws the same again, so the
same noise never hides two different gradients or messages. What hides something also depends on a
salt from the ledger, which is new after a restart, for all steps that were not begun: a party that
goes on from a backup, or begins anew with an old secret, does not reuse its noise.

Shapes: E episodes side by side, T steps.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn.agent import keys
from pevdn.config.experiment import Config
from pevdn.network.streams import Secret, Stream
from pevdn.privacy import gaussian, mechanism


class FromSecret:
    """Draws from a secret of the member's own."""

    def __init__(self, config: Config, secret: Secret, run: bytes) -> None:
        self._config, self._secret, self._run = config, secret, run
        self.salt = ""  # of the ledger, for the current step

    def initial_parameters(self) -> Array:
        """Return the key of the agent's first parameters."""
        return self._key("first parameters")

    def exploration(self, block: int, t: int) -> np.ndarray:
        """Return uniform (E, 2): whether the agent explores, and which action it then takes."""
        stream = self._secret.stream("exploration", self._run, block, t)
        return stream.uniform((self._config.block_size, 2)).astype(np.float32)

    def coin(self, seed: bytes, block: int, update: int) -> float:
        """Return a public uniform number that decides whether an update is made."""
        return float(Stream(seed, "coin", update).uniform((1,))[0])

    def minibatch(self, seed: bytes, block: int, update: int) -> np.ndarray:
        """Return uniform uint32 words (buffer_size,) that choose the minibatch.

        They are public, or the party's own if openings are noised.
        """
        if self._config.noised:
            stream = self._secret.stream("own minibatch", self._run, block, update, self.salt)
        else:
            stream = Stream(seed, "minibatch", update)
        return stream.words(self._config.settings.buffer_size)

    def opening(self, step: int, block: int, number: int, max_steps: int) -> np.ndarray:
        """Return uniform words (T, E, 4, 4) for the agent's noise in one opening of a block."""
        shape = (max_steps, self._config.block_size, *gaussian.WORDS)
        stream = self._secret.stream("opening", self._run, step, number, self.salt)
        return stream.words(math.prod(shape)).reshape(shape)

    def noise(self, step: int, block: int, update: int, size: int) -> np.ndarray:
        """Return uniform uint32 words (size, 4, 4) for the agent's noise."""
        shape = (size, *gaussian.WORDS)
        position = (step, update) if self._config.noised else (step,)  # several updates in a step
        stream = self._secret.stream("noise", self._run, *position, self.salt)
        return stream.words(math.prod(shape)).reshape(shape)

    def episodes(self, block: int) -> Array:
        """Return the world's keys (E,) of a block of episodes."""
        return keys.of_episodes(self._key("episodes", block), self._config.block_size)

    def evaluation(self, number: int) -> Array:
        """Return the world's keys (eval_episodes,) of an evaluation."""
        key = self._key("evaluation", number)
        return keys.of_episodes(key, self._config.settings.eval_episodes)

    def _key(self, *label: str | int) -> Array:
        words = np.frombuffer(self._secret.stream(*label, self._run).bytes(8), np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(words))


class FromSeed:
    """Draws the same from a seed, as the simulation of that seed does."""

    def __init__(self, config: Config, agents: int, index: int = 0) -> None:
        self._config, self._agents, self._index = config, agents, index
        self.salt = ""  # without effect
        self._shape = config.block_size, config.updates_due
        training, self._first = keys.of_lane(jax.random.key(config.seed))
        self._training = [training]  # the training key before each block
        self._of_block = jax.jit(keys.of_block, static_argnums=(1, 2))

    def initial_parameters(self) -> Array:
        return keys.of_agents(self._first, self._agents)[self._index]

    def exploration(self, block: int, t: int) -> np.ndarray:
        return np.asarray(_chances(self.episodes(block), t, self._agents))[:, self._index]

    def coin(self, seed: bytes, block: int, update: int) -> float:
        return float(jax.random.uniform(self._updates(block)[update, keys.COIN]))

    def minibatch(self, seed: bytes, block: int, update: int) -> np.ndarray:
        key, size = self._updates(block)[update, keys.MINIBATCH], self._config.settings.buffer_size
        if self._config.noised:
            key = keys.of_agents(key, self._agents)[self._index]
        return np.asarray(jax.random.bits(key, (size,), jnp.uint32))

    def opening(self, step: int, block: int, number: int, max_steps: int) -> np.ndarray:
        _, noise = keys.of_opening(self._key_before(block), number)
        own = keys.of_agents(noise, self._agents)[self._index]
        return np.asarray(mechanism.words(own, max_steps, self._config.block_size))

    def noise(self, step: int, block: int, update: int, size: int) -> np.ndarray:
        own = keys.of_agents(self._updates(block)[update, keys.NOISE], self._agents)[self._index]
        return np.asarray(mechanism.words(own, size))

    def episodes(self, block: int) -> Array:
        return self._block(block)[1]

    def evaluation(self, number: int) -> Array:
        key = keys.of_evaluation(self._config.seed, number)
        return keys.of_episodes(key, self._config.settings.eval_episodes)

    def _updates(self, block: int) -> Array:
        return self._block(block)[2]

    def _block(self, block: int) -> tuple[Array, Array, Array]:
        return self._of_block(self._key_before(block), *self._shape)

    def _key_before(self, block: int) -> Array:
        """Return the training key of a block."""
        while len(self._training) <= block:
            self._training.append(self._of_block(self._training[-1], *self._shape)[0])
        return self._training[block]


Randomness = FromSecret | FromSeed


@partial(jax.jit, static_argnums=2)
def _chances(episodes: Array, t: Array, agents: int) -> Array:
    """Return every agent's chances (E, N, 2) in step t, as the simulation draws them."""
    return jax.vmap(lambda key: keys.chances(keys.of_step(key, t)[0], agents))(episodes)
