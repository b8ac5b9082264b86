"""What one agent computes in an update. Algorithm 1, from COMPUTE m_i to UPDATE parameters.

    message          eq. (8)   m_i = γ max Q_i⁻(τ', ·) − Q_i(τ, a)
    team_error       eq. (7)   A = r + Σ_i m_i, from the sum that the exchange returns
    local_gradient   eq. (7)   −2 · A · ∂Q_i/∂θ_i, averaged along the episode
    improve                    optimiser, pull towards the anchor, target network

Nothing here has an agent axis: every array belongs to one agent. An episode has shape (T, ...);
a minibatch of B episodes (T, B, ...). Every function takes either.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pevdn.agent import network
from pevdn.agent.acting import UNAVAILABLE
from pevdn.agent.network import Inputs, Parameters, Trace
from pevdn.agent.replay import Episode


class Learner(NamedTuple):
    """Everything one agent learns with; its replay is kept apart."""

    params: Parameters  # θ_i
    target: Parameters  # θ_i⁻
    optimiser: optax.OptState
    anchor: Parameters  # the best model so far, if the team keeps one


def begin(
    key: Array, sizes: tuple[int, int, int], optimiser: optax.GradientTransformation
) -> Learner:
    """A fresh agent; `sizes` are its observation, action and hidden sizes."""
    params = network.initialise(key, *sizes)
    return Learner(params, params, optimiser.init(params), params)


def valid(batch: Episode) -> Array:
    """1 for the steps that were played, 0 for padding; (T, ...)."""
    steps = jnp.arange(batch.rewards.shape[0])
    return (steps.reshape(-1, *([1] * batch.length.ndim)) < batch.length).astype(jnp.float32)


def network_inputs(batch: Episode) -> Inputs:
    """What the network was given at each step and after the last, (T + 1, ...)."""
    before_first = jnp.full_like(batch.actions[:1], -1)
    last_actions = jnp.concatenate([before_first, batch.actions])
    return network.encode(batch.observations, last_actions, batch.available.shape[-1])


def of_taken(per_action: Array, batch: Episode) -> Array:
    """The entries of (T, ..., A) that belong to the actions taken, (T, ...)."""
    return jnp.sum(per_action * jax.nn.one_hot(batch.actions, per_action.shape[-1]), axis=-1)


def next_values(q: Array, q_target: Array, batch: Episode, double_q: bool) -> Array:
    """max_a' Q_i⁻(τ', a') over available actions (T, ...), 0 where the game ended.

    q and q_target are (T + 1, ..., A). With double Q the online values choose a', the target
    values it.
    """
    q_target = jnp.where(batch.available, q_target, UNAVAILABLE)[1:]
    if double_q:
        chosen = jnp.argmax(jnp.where(batch.available, q, UNAVAILABLE)[1:], axis=-1)
        best = jnp.sum(q_target * jax.nn.one_hot(chosen, q.shape[-1]), axis=-1)
    else:
        best = jnp.max(q_target, axis=-1)
    return jnp.where(batch.terminal | (valid(batch) == 0), 0.0, best)


class Memo(NamedTuple):
    """What an agent keeps between sending its message and hearing the sum."""

    inputs: Inputs
    trace: Trace


def message(
    params: Parameters, target: Parameters, batch: Episode, gamma: float, double_q: bool
) -> tuple[Array, Memo]:
    """m_i (T, ...), and what turns the team error into a gradient later."""
    inputs = network_inputs(batch)
    both = jax.tree.map(lambda *pair: jnp.stack(pair), params, target)
    (q, q_target), traces = jax.vmap(network.unroll, (0, None))(both, inputs)  # in one loop
    m = gamma * next_values(q, q_target, batch, double_q) - of_taken(q[:-1], batch)  # eq. (8)
    return m * valid(batch), Memo(inputs, jax.tree.map(lambda x: x[0], traces))


def team_error(total: Array, batch: Episode) -> Array:
    """A = r + Σ_i m_i (T, ...); `total` is the sum of the messages."""
    return (batch.rewards + total) * valid(batch)


def local_gradient(
    params: Parameters, memo: Memo, total: Array, batch: Episode, *, by_episode: bool = False
) -> Parameters:
    """−2 · A · ∂Q_i/∂θ_i: averaged along each episode, and summed over the episodes of the batch.

    With `by_episode` each episode's by itself, which DP-SGD clips before they are summed.
    """
    q_bar = -2.0 * team_error(total, batch) / jnp.maximum(batch.length, 1)
    q_bar = q_bar[..., None] * jax.nn.one_hot(batch.actions, batch.available.shape[-1])
    q_bar = jnp.concatenate([q_bar, jnp.zeros_like(q_bar[:1])])  # nothing was done after the last
    return network.gradient(params, *memo, q_bar, by_episode=by_episode)


def pull_to_anchor(gradient: Parameters, learner: Learner, strength: Array) -> Parameters:
    """Add the gradient of strength · ‖θ_i − anchor‖²; it uses no data."""
    return jax.tree.map(
        lambda g, p, a: g + 2.0 * strength * (p - a), gradient, learner.params, learner.anchor
    )


def improve(
    learner: Learner, gradient: Parameters, optimiser: optax.GradientTransformation, rate: Array
) -> Learner:
    """One optimiser step, then move the target network `rate` of the way to the new parameters.

    A rate of 1 is a hard update, 0 leaves the target as it was.
    """
    updates, state = optimiser.update(gradient, learner.optimiser, learner.params)
    params: Parameters = optax.apply_updates(learner.params, updates)
    target = jax.tree.map(lambda t, p: t + rate * (p - t), learner.target, params)
    return learner._replace(params=params, target=target, optimiser=state)
