"""One agent's Q-network: linear, ReLU, GRU, linear, over its own observation and last action.

Written as plain functions over a tuple of arrays, because the recurrent scan is the hot loop of
the whole program: the input projection is one product for the whole episode, and the gradient of
the recurrent weights is one product after the backward scan (a custom derivative) instead of a
sum kept up to date at every step.

Shapes: T steps, ... any batch axes, O observation, A actions, H hidden. Time comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Parameters(NamedTuple):
    """θ_i, the parameters of one agent's Q-function."""

    input_weight: Array  # (O + A, H)
    input_bias: Array  # (H,)
    gates_weight: Array  # (H, 3H): reset, update, candidate
    gates_bias: Array  # (3H,)
    recurrent_weight: Array  # (H, 3H)
    candidate_bias: Array  # (H,)
    output_weight: Array  # (H, A)
    output_bias: Array  # (A,)


def initialise(key: Array, observation_size: int, n_actions: int, hidden_size: int) -> Parameters:
    """Orthogonal weights, zero biases; each gate of the GRU is orthogonal by itself."""
    orthogonal = jax.nn.initializers.orthogonal()
    k_in, k_gates, k_out = jax.random.split(key, 3)
    H = hidden_size
    gates = jax.vmap(lambda k: orthogonal(k, (H, H)))(jax.random.split(k_gates, 6))

    return Parameters(
        input_weight=orthogonal(k_in, (observation_size + n_actions, H)),
        input_bias=jnp.zeros(H),
        gates_weight=jnp.concatenate(gates[:3], axis=1),
        gates_bias=jnp.zeros(3 * H),
        recurrent_weight=jnp.concatenate(gates[3:], axis=1),
        candidate_bias=jnp.zeros(H),
        output_weight=orthogonal(k_out, (H, n_actions)),
        output_bias=jnp.zeros(n_actions),
    )


def initial_memory(params: Parameters, *batch: int) -> Array:
    """The hidden state before the first step, (..., H)."""
    return jnp.zeros((*batch, params.candidate_bias.shape[-1]))


def step(
    params: Parameters, memory: Array, observation: Array, last_action: Array
) -> tuple[Array, Array]:
    """One step of acting: memory (..., H) and Q-values (..., A).

    `last_action` is −1 before the first action, which one-hot encodes to zeros.
    """
    gates = _input_gates(params, observation, last_action)
    memory, _ = _gru_step(params.recurrent_weight, params.candidate_bias, memory, gates)
    return memory, memory @ params.output_weight + params.output_bias


def unroll(params: Parameters, observations: Array, last_actions: Array) -> Array:
    """Q-values (T, ..., A) along whole episodes of observations (T, ..., O)."""
    gates = _input_gates(params, observations, last_actions)
    memories = _gru(params.recurrent_weight, params.candidate_bias, gates)
    return memories @ params.output_weight + params.output_bias


def _input_gates(params: Parameters, observation: Array, last_action: Array) -> Array:
    """What the input adds to the GRU's three gates, (..., 3H)."""
    n_actions = params.output_bias.shape[-1]
    inputs = jnp.concatenate([observation, jax.nn.one_hot(last_action, n_actions)], axis=-1)
    features = jax.nn.relu(inputs @ params.input_weight + params.input_bias)
    return features @ params.gates_weight + params.gates_bias


def _gru_step(
    recurrent_weight: Array, candidate_bias: Array, memory: Array, gates: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    reset_in, update_in, candidate_in = jnp.split(gates, 3, axis=-1)
    reset_h, update_h, candidate_h = jnp.split(memory @ recurrent_weight, 3, axis=-1)
    reset = jax.nn.sigmoid(reset_in + reset_h)
    update = jax.nn.sigmoid(update_in + update_h)
    recalled = candidate_h + candidate_bias
    candidate = jnp.tanh(candidate_in + reset * recalled)
    return (1 - update) * candidate + update * memory, (reset, update, candidate, recalled)


@jax.custom_vjp
def _gru(recurrent_weight: Array, candidate_bias: Array, gates: Array) -> Array:
    """Memories (T, ..., H) after each step, from zero memory, for input gates (T, ..., 3H)."""
    return _gru_forward(recurrent_weight, candidate_bias, gates)[0]


def _gru_forward(
    recurrent_weight: Array, candidate_bias: Array, gates: Array
) -> tuple[Array, tuple[Array, ...]]:
    start = jnp.zeros_like(gates[0, ..., : candidate_bias.shape[-1]])

    def body(memory: Array, gate: Array) -> tuple[Array, tuple[Array, ...]]:
        memory, inner = _gru_step(recurrent_weight, candidate_bias, memory, gate)
        return memory, (memory, *inner)

    _, (memories, *inner) = jax.lax.scan(body, start, gates)
    return memories, (recurrent_weight, memories, *inner)


def _gru_backward(residuals: tuple[Array, ...], memories_bar: Array) -> tuple[Array, Array, Array]:
    recurrent_weight, memories, resets, updates, candidates, recalleds = residuals
    previous = jnp.concatenate([jnp.zeros_like(memories[:1]), memories[:-1]])

    def body(memory_bar: Array, xs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        bar, before, reset, update, candidate, recalled = xs
        bar = bar + memory_bar
        candidate_bar = bar * (1 - update) * (1 - candidate**2)
        update_bar = bar * (before - candidate) * update * (1 - update)
        reset_bar = candidate_bar * recalled * reset * (1 - reset)
        recalled_bar = candidate_bar * reset
        recurrent_bar = jnp.concatenate([reset_bar, update_bar, recalled_bar], axis=-1)
        memory_bar = bar * update + recurrent_bar @ recurrent_weight.T
        return memory_bar, (recurrent_bar, candidate_bar)

    _, (recurrent_bars, candidate_bars) = jax.lax.scan(
        body,
        jnp.zeros_like(memories[0]),
        (memories_bar, previous, resets, updates, candidates, recalleds),
        reverse=True,
    )
    H = memories.shape[-1]
    # One product over all steps (and batch entries) instead of one a step.
    weight_bar = previous.reshape(-1, H).T @ recurrent_bars.reshape(-1, 3 * H)
    bias_bar = recurrent_bars[..., 2 * H :].reshape(-1, H).sum(0)
    gates_bar = jnp.concatenate([recurrent_bars[..., : 2 * H], candidate_bars], axis=-1)
    return weight_bar, bias_bar, gates_bar


_gru.defvjp(_gru_forward, _gru_backward)
