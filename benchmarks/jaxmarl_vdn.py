"""What JaxMARL's `vdn_rnn.py` computes in one update, to compare with: written anew with flax.

One network for all agents, which are told apart by a one-hot number in their input; the GRU cell is
scanned over whole padded episodes, gradients come from automatic differentiation, and the target's
pass is a scan of its own. Batch, hidden size and horizon are as in ours; actions are masked and the
target chosen by double Q as in ours, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Recurrent(nn.Module):
    """A GRU cell scanned over time; it forgets where an episode ends."""

    @partial(
        nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False}
    )
    @nn.compact
    def __call__(self, memory: Any, x: Any) -> Any:
        features, reset = x
        memory = jnp.where(reset[:, None], jnp.zeros_like(memory), memory)
        return nn.GRUCell(features=memory.shape[-1])(memory, features)


class QNetwork(nn.Module):
    actions: int
    hidden: int

    @nn.compact
    def __call__(self, observations: Any, resets: Any) -> Any:
        x = nn.relu(nn.Dense(self.hidden)(observations))
        memory = jnp.zeros((observations.shape[1], self.hidden))
        _, memories = Recurrent()(memory, (x, resets))
        return nn.Dense(self.actions)(memories)


def jaxmarl_update(world: Any, settings: Any) -> Callable[[], Any]:
    """One update of 32 full-length episodes, ready to be called again and again."""
    N, T, B = len(world.agents), world.max_steps + 1, settings.expected_batch_size
    A, O = world.agents[0].n_actions, world.agents[0].observation_size
    network = QNetwork(A, settings.hidden_size)
    key = jax.random.key(0)
    observations = jax.random.normal(key, (T, N * B, O + N))
    resets = jnp.zeros((T, N * B), bool)
    actions = jax.random.randint(key, (T, N * B), 0, A)
    rewards = jax.random.normal(key, (T, B))
    params = network.init(key, observations, resets)
    optimiser = optax.chain(optax.clip_by_global_norm(10.0), optax.radam(settings.learning_rate))

    @jax.jit
    def update(params: Any, target: Any, state: Any) -> Any:
        def loss(params: Any) -> Any:
            q = network.apply(params, observations, resets)
            q_target = network.apply(target, observations, resets)
            taken = jnp.take_along_axis(q, actions[..., None], -1)[..., 0]
            best = jnp.argmax(jax.lax.stop_gradient(q), -1)
            then = jnp.take_along_axis(q_target, best[..., None], -1)[..., 0]
            team = [x.reshape(T, N, B).sum(1) for x in (taken, then)]
            aim = rewards[:-1] + settings.gamma * team[1][1:]
            return jnp.mean((team[0][:-1] - jax.lax.stop_gradient(aim)) ** 2)

        gradient = jax.grad(loss)(params)
        updates, state = optimiser.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        target = optax.incremental_update(params, target, settings.target_rate)
        return params, target, state

    return lambda: update(params, params, optimiser.init(params))
