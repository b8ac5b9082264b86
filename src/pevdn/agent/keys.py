"""Derive all random keys of a training, for both runtimes.

    key of a lane ─┬─ initial parameters of the agents (N,)
                   └─ training key ─┬─ training key of the next block
                                    ├─ openings (n, 2): shares, noise (N,)
                                    ├─ episodes (E,) ─┬─ reset
                                    │                 └─ every step: agents, world
                                    └─ updates (U, 4): coin, minibatch, shares, noise (N,)

Evaluations derive from the seed alone, separately from everything that training draws.
Shapes: E episodes of a block, U updates that it calls for, n openings of an episode, N agents.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

COIN, MINIBATCH, SHARES, NOISE = range(4)  # the keys of an update
AFTER_TRAINING = 2**31 - 1  # number of the evaluation of `pevdn evaluate` and `pevdn replay`
_OPENING = 0x6F70656E  # a branch of a block's key that `of_block` never takes
_EVALUATION = 0x65766C  # a branch of the seed's key that training never takes


def of_lane(key: Array) -> tuple[Array, Array]:
    """Return the training key, and the key of the agents' initial parameters."""
    training, agents = jax.random.split(key, 2)
    return training, agents


def of_agents(key: Array, agents: int) -> Array:
    """Return one key per agent (N,): for initial parameters, a sample or noise of its own."""
    return jax.random.split(key, agents)


def of_block(key: Array, episodes: int, updates: int) -> tuple[Array, Array, Array]:
    """Return the training key of the next block, and keys of episodes (E,) and updates (U, 4)."""
    following, for_episodes, for_updates = jax.random.split(key, 3)
    return (
        following,
        of_episodes(for_episodes, episodes),
        jax.random.split(for_updates, (updates, 4)),
    )


def of_opening(key: Array, number: int) -> tuple[Array, Array]:
    """Return the keys of shares and noise of one opening, given the training key of its block.

    A block has one opening for every age at which episodes are opened; `number` counts them.
    """
    opening = jax.random.fold_in(jax.random.fold_in(key, _OPENING), number)
    shares, noise = jax.random.split(opening, 2)
    return shares, noise


def of_episodes(key: Array, episodes: int) -> Array:
    """Return the keys of episodes (E,), given that of their block or evaluation."""
    return jax.random.split(key, episodes)


def of_reset(episode: Array, max_steps: int) -> Array:
    """Return the world's key for a reset; its steps use the numbers below `max_steps`."""
    return jax.random.fold_in(episode, max_steps)


def of_step(episode: Array, t: Array | int) -> tuple[Array, Array]:
    """Return the agents' key and the world's key of step t."""
    acting, world = jax.random.split(jax.random.fold_in(episode, t))
    return acting, world


def chances(acting: Array, agents: int) -> Array:
    """Draw uniform (N, 2): whether each agent explores in a step, and with which action."""
    return jax.random.uniform(acting, (agents, 2))


def world_seed(key: Array) -> Array:
    """Return the seed (31 bits) that resets an external world; a compiled one gets the key."""
    return (jax.random.bits(key, dtype=jnp.uint32) >> 1).astype(jnp.int32)


def of_evaluation(seed: Array | int, number: Array | int) -> Array:
    """Return the key of an evaluation; it depends on the seed and the number alone."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _EVALUATION), number)
