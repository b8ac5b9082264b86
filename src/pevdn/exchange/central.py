"""Vanilla VDN: a central node sees all data and differentiates the joint loss through the sum.

This baseline breaks the privacy policy. It uses the agents' networks but not their gradient code,
and so checks independently that −2 · A · ∂Q_i/∂θ_i is the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.agent import networks
from pevdn.agent.learning import (
    network_inputs,
    next_values,
    of_taken,
    returns_of_values,
    team_error,
)
from pevdn.agent.networks import Parameters
from pevdn.agent.replay import Episode


def team_loss(
    params: Sequence[Parameters],
    targets: Sequence[Parameters],
    batches: Sequence[Episode],
    gamma: float,
    double_q: bool,
    lam: float = 0.0,
) -> Array:
    """eq. (6): (r + Σ_i (γ max Q_i⁻ − Q_i))², averaged along each episode, summed over the batch.

    Arguments have one entry per kind, with the agents of that kind along the first axis; batches
    are (n, T, B, ...).
    """

    def temporal_difference(theta: Parameters, target: Parameters, batch: Episode) -> Array:
        inputs = network_inputs(batch)
        values = networks.of(theta).values
        q, q_target = values(theta, inputs), values(target, inputs)
        best = jax.lax.stop_gradient(next_values(q, q_target, batch, double_q))
        return returns_of_values(best, batch, gamma, lam) - of_taken(q[:-1], batch)

    differences = [
        jax.vmap(temporal_difference)(*of_kind).sum(0)
        for of_kind in zip(params, targets, batches, strict=True)
    ]
    shared: Episode = jax.tree.map(lambda x: x[0], batches[0])  # reward and length are the team's
    error = team_error(sum(differences, jnp.zeros(())), shared, gamma * lam)
    return jnp.sum(error**2 / jnp.maximum(shared.length, 1))


team_gradient = jax.grad(team_loss)
