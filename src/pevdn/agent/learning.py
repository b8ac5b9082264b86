"""What one agent computes in an update. Algorithm 1, from COMPUTE m_i to UPDATE parameters.

    message          eq. (8)   m_i = γ max Q_i⁻(τ', ·) − Q_i(τ, a)
    team_error       eq. (7)   A = r + Σ_i m_i, from the sum that the exchange returns
    local_gradient   eq. (7)   −2 · A · ∂Q_i/∂θ_i, averaged along the episode
    improve                    optimiser, pull towards the anchor, target network

Nothing here has an agent axis: every array belongs to one agent. An episode has shape (T, ...);
a minibatch of B episodes (T, B, ...). Every function takes either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pevdn.agent import network
from pevdn.agent.acting import UNAVAILABLE
from pevdn.agent.network import Parameters
from pevdn.agent.replay import Episode

Pullback = Callable[[Array], tuple[Parameters]]


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


def time_first(minibatch: Episode) -> Episode:
    """(B, T, ...) as stored to (T, B, ...) as learnt from; a single episode stays as it is."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, minibatch)


def valid(batch: Episode) -> Array:
    """1 for the steps that were played, 0 for padding; (T, ...)."""
    steps = jnp.arange(batch.rewards.shape[0])
    return (steps.reshape(-1, *([1] * batch.length.ndim)) < batch.length).astype(jnp.float32)


def taken_values(params: Parameters, batch: Episode) -> tuple[Array, Array]:
    """Q_i(τ, a) of the actions taken (T, ...), and all Q-values (T + 1, ..., A)."""
    actions = batch.actions.astype(jnp.int32)
    before_first = jnp.full_like(actions[:1], -1)
    q = network.unroll(params, batch.observations, jnp.concatenate([before_first, actions]))
    return jnp.sum(q[:-1] * jax.nn.one_hot(actions, q.shape[-1]), axis=-1), q


def next_values(target: Parameters, q: Array, batch: Episode, double_q: bool) -> Array:
    """max_a' Q_i⁻(τ', a') over available actions (T, ...), 0 where the game ended.

    With double Q the online values q (T + 1, ..., A) choose a', the target values it.
    """
    _, q_target = taken_values(target, batch)
    q_target = jnp.where(batch.available, q_target, UNAVAILABLE)[1:]
    if double_q:
        chosen = jnp.argmax(jnp.where(batch.available, q, UNAVAILABLE)[1:], axis=-1)
        best = jnp.sum(q_target * jax.nn.one_hot(chosen, q.shape[-1]), axis=-1)
    else:
        best = jnp.max(q_target, axis=-1)
    return jnp.where(batch.terminal | (valid(batch) == 0), 0.0, best)


def message(
    params: Parameters, target: Parameters, batch: Episode, gamma: float, double_q: bool
) -> tuple[Array, Pullback]:
    """m_i (T, ...), and the pullback of Q_i that later turns the team error into a gradient."""
    q_taken, pullback, q = jax.vjp(lambda p: taken_values(p, batch), params, has_aux=True)
    m = gamma * next_values(target, q, batch, double_q) - q_taken  # eq. (8)
    return m * valid(batch), pullback


def team_error(total: Array, batch: Episode) -> Array:
    """A = r + Σ_i m_i (T, ...); `total` is the sum of the messages."""
    return (batch.rewards + total) * valid(batch)


def local_gradient(pullback: Pullback, total: Array, batch: Episode) -> Parameters:
    """−2 · A · ∂Q_i/∂θ_i: averaged along each episode, summed over the episodes of the batch."""
    (gradient,) = pullback(-2.0 * team_error(total, batch) / jnp.maximum(batch.length, 1))
    return gradient


def episode_gradient(params: Parameters, total: Array, episode: Episode) -> Parameters:
    """The same for one episode by itself, which DP-SGD clips before it is summed."""
    _, pullback = jax.vjp(lambda p: taken_values(p, episode)[0], params)
    return local_gradient(pullback, total, episode)


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
