"""Everything that is drawn, by whom, and from what.

In earnest (`Own`) a party draws its own numbers from its secret, which came from the operating
system, and the minibatches from the seed that all parties made together. In a rehearsal everything
is drawn from one seed, as in the simulation of that seed, so that the two can be compared; it
hides nothing.

Numbers belong to a round or a block, not to a moment: computed again after a kill they are the
same, so that the same noise never hides two different gradients.

Shapes: E episodes side by side.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn.network.streams import Secret, Stream
from pevdn.privacy import gaussian, mechanism
from pevdn.training.loop import evaluation_keys


class Draws(Protocol):
    """What a party and the world draw."""

    def first(self, index: int, agents: int) -> Array:
        """The key of agent `index`'s first parameters."""
        ...

    def chance(self, block: int, step: int, index: int, agents: int, episodes: int) -> np.ndarray:
        """Uniform (E, 2): whether the agent explores, and how."""
        ...

    def coin(self, seed: bytes, block: int, number: int, due: int) -> float:
        """Uniform: whether update `number` of `due` is made, where not every one is."""
        ...

    def tickets(self, seed: bytes, block: int, number: int, due: int, slots: int) -> np.ndarray:
        """Uniform uint32 words (slots,): which episodes are learnt from."""
        ...

    def noise(
        self, round: int, block: int, number: int, due: int, index: int, agents: int, size: int
    ) -> np.ndarray:
        """Uniform uint32 words (size, 4, 4), from which the agent's noise is made."""
        ...

    def world(self, block: int, episodes: int) -> Array:
        """Keys (E,) of a block of episodes."""
        ...

    def evaluation(self, number: int, episodes: int) -> Array:
        """Keys (E,) of an evaluation."""
        ...


class Own:
    """From a secret of one's own."""

    def __init__(self, secret: Secret, run: bytes) -> None:
        self._secret, self._run = secret, run

    def first(self, index: int, agents: int) -> Array:
        return self._key("first parameters")

    def chance(self, block: int, step: int, index: int, agents: int, episodes: int) -> np.ndarray:
        stream = self._secret.stream("exploration", self._run, block, step)
        return stream.uniform((episodes, 2)).astype(np.float32)

    def coin(self, seed: bytes, block: int, number: int, due: int) -> float:
        return float(Stream(seed, "coin", number).uniform((1,))[0])

    def tickets(self, seed: bytes, block: int, number: int, due: int, slots: int) -> np.ndarray:
        return Stream(seed, "minibatch", number).words(slots)

    def noise(
        self, round: int, block: int, number: int, due: int, index: int, agents: int, size: int
    ) -> np.ndarray:
        shape = (size, *gaussian.WORDS)
        stream = self._secret.stream("noise", self._run, round)
        return stream.words(math.prod(shape)).reshape(shape)

    def world(self, block: int, episodes: int) -> Array:
        return jax.random.split(self._key("episodes", block), episodes)

    def evaluation(self, number: int, episodes: int) -> Array:
        return jax.random.split(self._key("evaluation", number), episodes)

    def _key(self, *label: str | int) -> Array:
        words = np.frombuffer(self._secret.stream(*label, self._run).bytes(8), np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(words))


class Rehearsal:
    """From a seed, as in the simulation."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._start, self._agents = jax.random.split(jax.random.key(seed), 2)
        self._blocks = [self._start]  # the key before each block

    def first(self, index: int, agents: int) -> Array:
        return jax.random.split(self._agents, agents)[index]

    def chance(self, block: int, step: int, index: int, agents: int, episodes: int) -> np.ndarray:
        return np.asarray(_chances(self.world(block, episodes), step, agents))[:, index]

    def coin(self, seed: bytes, block: int, number: int, due: int) -> float:
        return float(jax.random.uniform(self._update(block, number, due)[0]))

    def tickets(self, seed: bytes, block: int, number: int, due: int, slots: int) -> np.ndarray:
        key = self._update(block, number, due)[1]
        return np.asarray(jax.random.bits(key, (slots,), jnp.uint32))

    def noise(
        self, round: int, block: int, number: int, due: int, index: int, agents: int, size: int
    ) -> np.ndarray:
        key = jax.random.split(self._update(block, number, due)[3], agents)[index]
        return np.asarray(mechanism.words(key, size))

    def world(self, block: int, episodes: int) -> Array:
        return _split(self._of_block(block)[1], episodes)

    def evaluation(self, number: int, episodes: int) -> Array:
        return _split(evaluation_keys(jnp.array([self._seed]), number)[0], episodes)

    def _of_block(self, block: int) -> Array:
        """Next block's key, the episodes' and the updates'."""
        while len(self._blocks) <= block + 1:
            self._blocks.append(_split(self._blocks[-1], 3)[0])
        return _split(self._blocks[block], 3)

    def _update(self, block: int, number: int, due: int) -> Array:
        return _split(self._of_block(block)[2], due, 4)[number]


@partial(jax.jit, static_argnums=(2,))
def _chances(keys: Array, step: Array, agents: int) -> Array:
    """(E, N, 2), as every agent's is drawn in the simulation."""
    now = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, step)))(keys)
    return jax.vmap(lambda key: jax.random.uniform(key, (agents, 2)))(now[:, 0])


def _split(key: Array, *shape: int) -> Array:
    return _splitter(shape)(key)


@cache
def _splitter(shape: tuple[int, ...]) -> jax.stages.Wrapped:
    return jax.jit(lambda key: jax.random.split(key, shape))
