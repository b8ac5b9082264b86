"""The formulas of an update. Algorithm 1, from COMPUTE m_i to UPDATE parameters.

    message          eq. (8)   m_i = γ max Q_i⁻(τ', ·) − Q_i(τ, a)
    team_error       eq. (7)   A = r + Σ_i m_i, from the sum that the exchange returns
    local_gradient   eq. (7)   −2 · A · ∂Q_i/∂θ_i, averaged along the episode
    pull_to_anchor             the gradient of the distance to the anchor
    improve                    optimiser, target network, average

Nothing here has an agent axis: every array belongs to one agent. An episode has shape (T, ...), a
minibatch of B episodes (T, B, ...); every function takes either. Coefficients are Python numbers,
or traced ones where they differ by lane.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pevdn.agent import networks, recurrent
from pevdn.agent.acting import UNAVAILABLE
from pevdn.agent.networks import Parameters
from pevdn.agent.recurrent import Inputs
from pevdn.agent.replay import Episode
from pevdn.config.settings import is_zero


class Learner(NamedTuple):
    """The learning state of one agent, without its replay buffer."""

    params: Parameters  # θ_i
    target: Parameters  # θ_i⁻
    optimiser: optax.OptState
    anchor: Parameters  # the best-evaluated model so far, if the team keeps one
    average: Parameters  # average of θ_i over updates; θ_i itself without averaging


def begin(params: Parameters, optimiser: optax.GradientTransformation) -> Learner:
    """Return a fresh learner."""
    return Learner(params, params, optimiser.init(params), params, params)


def valid(batch: Episode) -> Array:
    """Return 1 for steps that were played, 0 for padding; (T, ...)."""
    steps = jnp.arange(batch.rewards.shape[0])
    return (steps.reshape(-1, *([1] * batch.length.ndim)) < batch.length).astype(jnp.float32)


def network_inputs(batch: Episode) -> Inputs:
    """Return the network's inputs at each step and after the last, (T + 1, ...)."""
    before_first = jnp.full_like(batch.actions[:1], -1)
    last_actions = jnp.concatenate([before_first, batch.actions])
    return recurrent.encode(batch.observations, last_actions, batch.available.shape[-1])


def of_taken(per_action: Array, batch: Episode) -> Array:
    """Select the entries of (T, ..., A) for the actions taken; (T, ...)."""
    return jnp.sum(per_action * jax.nn.one_hot(batch.actions, per_action.shape[-1]), axis=-1)


def next_values(q: Array, q_target: Array, batch: Episode, double_q: bool) -> Array:
    """max_a' Q_i⁻(τ', a') over available actions (T, ...), 0 where the game ended.

    q and q_target are (T + 1, ..., A). With double Q the online values choose a', and the
    target values evaluate it.
    """
    q_target = jnp.where(batch.available, q_target, UNAVAILABLE)[1:]
    if double_q:
        chosen = jnp.argmax(jnp.where(batch.available, q, UNAVAILABLE)[1:], axis=-1)
        best = jnp.sum(q_target * jax.nn.one_hot(chosen, q.shape[-1]), axis=-1)
    else:
        best = jnp.max(q_target, axis=-1)
    return jnp.where(batch.terminal | (valid(batch) == 0), 0.0, best)


class Memo(NamedTuple):
    """Intermediate results that an agent keeps between its message and the opened sum."""

    inputs: Inputs
    trace: Any


def later(x: Array, rate: float) -> Array:
    """Return Σ_{k ≥ 1} rate^k · x_{t + k} for every step t of x (T, ...)."""
    ahead = jnp.arange(x.shape[0])[None, :] - jnp.arange(x.shape[0])[:, None]
    weights = jnp.where(ahead > 0, rate ** jnp.maximum(ahead, 0).astype(jnp.float32), 0.0)
    return jnp.tensordot(weights, x, axes=1)


def returns_of_values(after: Array, batch: Episode, gamma: float, lam: float) -> Array:
    """Return the contribution of the values after each step (T, ...) to the λ-return.

    For λ = `lam` = 0 it is γ · `after`. The λ-return is linear in rewards and values, so each agent
    computes its own part, and a message is still one number per step.
    """
    if is_zero(lam):
        return gamma * after
    before = jnp.concatenate([jnp.zeros_like(after[:1]), after[:-1]])
    return gamma * after + later((gamma * after - before) * valid(batch), gamma * lam)


def message(
    params: Parameters,
    target: Parameters,
    batch: Episode,
    gamma: float,
    double_q: bool,
    lam: float = 0.0,
) -> tuple[Array, Memo]:
    """Return m_i (T, ...) and what `local_gradient` needs later."""
    inputs = network_inputs(batch)
    q, q_target, trace = networks.of(params).unroll_both(params, target, inputs)
    after = next_values(q, q_target, batch, double_q)
    m = returns_of_values(after, batch, gamma, lam) - of_taken(q[:-1], batch)  # eq. (8)
    return m * valid(batch), Memo(inputs, trace)


def capped_reward(reward: Array, cap: float) -> Array:
    """Cap the team's reward of a step, as an agent stores it; a `cap` of 0 disables this.

    A rare, large bonus makes a few gradients far longer than the rest. Clipping them to the same
    length biases the values from the mean towards the median.
    """
    if is_zero(cap):
        return reward
    return jnp.minimum(
        reward, cap if isinstance(cap, int | float) else jnp.where(cap, cap, jnp.inf)
    )


def team_rewards(batch: Episode, rate: float = 0.0) -> Array:
    """Return r (T, ...); with λ-returns, this and all later rewards, discounted by `rate` = γλ."""
    rewards = batch.rewards * valid(batch)
    return rewards if is_zero(rate) else rewards + later(rewards, rate)


def team_error(total: Array, batch: Episode, rate: float = 0.0) -> Array:
    """A = r + Σ_i m_i (T, ...); `total` is the sum of the messages."""
    return (team_rewards(batch, rate) + total) * valid(batch)


def end_by_clock(batch: Episode) -> Episode:
    """Return the episodes with truncation at the step limit counted as a terminal step."""
    steps = jnp.arange(batch.rewards.shape[0]).reshape(-1, *([1] * batch.length.ndim))
    return batch._replace(terminal=batch.terminal | (steps == batch.length - 1))


def local_gradient(
    params: Parameters, memo: Memo, error: Array, batch: Episode, *, by_episode: bool = False
) -> Parameters:
    """Return −2 · A · ∂Q_i/∂θ_i, averaged along each episode and summed over the batch.

    `error` is A (T, ...). With `by_episode`, return the gradient of each episode, which DP-SGD
    clips before summing.
    """
    q_bar = -2.0 * error / jnp.maximum(batch.length, 1)
    q_bar = q_bar[..., None] * jax.nn.one_hot(batch.actions, batch.available.shape[-1])
    q_bar = jnp.concatenate(
        [q_bar, jnp.zeros_like(q_bar[:1])]
    )  # no action follows the last observation
    found: Parameters = networks.of(params).gradient(params, *memo, q_bar, by_episode=by_episode)
    return found


def pull_to_anchor(gradient: Parameters, learner: Learner, strength: Array) -> Parameters:
    """Add the gradient of strength · ‖θ_i − anchor‖², which uses no data."""
    return jax.tree.map(
        lambda g, p, a: g + 2.0 * strength * (p - a), gradient, learner.params, learner.anchor
    )


class Rates(NamedTuple):
    """Step sizes of one update."""

    step: Array  # factor of the optimiser's step
    target: Array  # fraction that the target moves towards the parameters
    average: Array  # fraction that the average moves towards the parameters


def improve(
    learner: Learner, gradient: Parameters, optimiser: optax.GradientTransformation, rates: Rates
) -> Learner:
    """Make one optimiser step; move target network and average towards the new parameters."""
    updates, state = optimiser.update(gradient, learner.optimiser, learner.params)
    updates = jax.tree.map(lambda u: rates.step * u, updates)
    params: Parameters = optax.apply_updates(learner.params, updates)

    def follow(old: Parameters, rate: Array) -> Parameters:
        moved: Parameters = jax.tree.map(lambda x, p: x + rate * (p - x), old, params)
        return moved

    return learner._replace(
        params=params,
        target=follow(learner.target, rates.target),
        optimiser=state,
        average=follow(learner.average, rates.average),
    )
