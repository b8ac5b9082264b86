"""One agent's recurrent Q-network: linear, ReLU, GRU, linear, over its observation and last action.

This is the hot loop of training, so it is written as plain functions over a tuple of arrays with a
hand-written derivative. Layers without memory are one product over all steps. The forward pass
stores only the memories; the backward pass recomputes the rest for all steps at once. Weight
gradients are products after the backward loop: summed over episodes, or per episode for DP-SGD.
The three gates enter the loops as separate arrays: slicing one array inside a loop keeps XLA's CPU
backend from vectorising the step and makes it four times slower (docs/performance.md). Loops are
indexed, not scanned: under a vmap over agents, a scan would transpose time to the front and copy.

Shapes: T steps, ... any batch axes, O observation, A actions, H hidden. Time is the leading axis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    """Return orthogonal weights and zero biases; each gate of the GRU is orthogonal by itself."""
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
    """Return the hidden state before the first step, (..., H)."""
    return jnp.zeros((*batch, params.candidate_bias.shape[-1]))


def sizes(params: Parameters) -> tuple[int, int]:
    """Return the size of an observation and the number of actions."""
    n_actions = params.output_bias.shape[-1]
    return params.input_weight.shape[-2] - n_actions, n_actions


class Inputs(NamedTuple):
    """The network's input as two arrays: concatenating them would copy at every use."""

    observation: Array  # (..., O)
    last_action: Array  # (..., A) one-hot


def encode(observation: Array, last_action: Array, n_actions: int) -> Inputs:
    """Return the inputs; `last_action` is −1 before the first action, which encodes to zeros."""
    return Inputs(observation, jax.nn.one_hot(last_action, n_actions))


def step(
    params: Parameters, memory: Array, observation: Array, last_action: Array
) -> tuple[Array, Array]:
    """Return the next memory (..., H) and the Q-values (..., A) of one step of acting."""
    inputs = encode(observation, last_action, params.output_bias.shape[-1])
    _, gates = _input_gates(params, inputs)
    memory, _ = _gru_step(params, memory, gates)
    return memory, memory @ params.output_weight + params.output_bias


Gates = tuple[Array, Array, Array]  # reset, update, candidate, each (..., H)


class Trace(NamedTuple):
    """Intermediate values of the forward pass that the derivative needs."""

    features: Array  # (T, ..., H)
    gates: Gates  # (T, ..., H) each gate's input from the features
    memories: Array  # (T, ..., H) after each step


def unroll(params: Parameters, inputs: Inputs) -> tuple[Array, Trace]:
    """Return Q-values (T, ..., A) along whole episodes of inputs (T, ...), and the trace."""
    features, gates = _input_gates(params, inputs)

    def body(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        memory, memories = carry
        memory, _ = _gru_step(params, memory, _at(t, gates))
        return memory, _put(t, memories, memory)

    start = (jnp.zeros_like(features[0]), jnp.zeros_like(features))
    _, memories = jax.lax.fori_loop(0, features.shape[0], body, start)
    q = memories @ params.output_weight + params.output_bias
    return q, Trace(features, gates, memories)


def unroll_both(
    params: Parameters, target: Parameters, inputs: Inputs
) -> tuple[Array, Array, Trace]:
    """Return the Q-values of both networks and the trace of `params`, computed in one loop."""
    both = jax.tree.map(lambda *pair: jnp.stack(pair), params, target)
    (q, q_target), traces = jax.vmap(unroll, (0, None))(both, inputs)
    return q, q_target, jax.tree.map(lambda x: x[0], traces)


def gradient(
    params: Parameters, inputs: Inputs, trace: Trace, q_bar: Array, *, by_episode: bool = False
) -> Parameters:
    """Return the gradient of the parameters from that of the Q-values, q_bar (T, ..., A).

    It is summed over the batch axes; with `by_episode` they are the leading axes of every array.
    """
    features, gates, memories = trace
    before = jnp.concatenate([jnp.zeros_like(memories[:1]), memories[:-1]])
    _, (reset, update, candidate, recalled) = _gru_step(params, before, gates)
    # Derivatives of the memory after the step by the inputs of the gates.
    by_candidate = (1 - update) * (1 - candidate**2)
    by_update = (before - candidate) * update * (1 - update)
    by_recalled = by_candidate * reset
    by_reset = by_recalled * recalled * (1 - reset)
    to_reset, to_update, to_recalled = (w.T for w in _thirds(params.recurrent_weight))

    per_step = (q_bar @ params.output_weight.T, by_reset, by_update, by_recalled, update)
    last = features.shape[0] - 1

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        later, bars = carry
        bar, reset, update_, recalled, update = _at(last - i, per_step)
        bar = bar + later
        earlier = bar * update + (bar * reset) @ to_reset
        earlier = earlier + (bar * update_) @ to_update + (bar * recalled) @ to_recalled
        return earlier, _put(last - i, bars, bar)

    start = (jnp.zeros_like(memories[0]), jnp.zeros_like(memories))
    _, bar = jax.lax.fori_loop(0, last + 1, body, start)
    inner = [bar * by_reset, bar * by_update]
    gates_bar = jnp.concatenate([*inner, bar * by_candidate], axis=-1)
    recurrent_bar = jnp.concatenate([*inner, bar * by_recalled], axis=-1)
    features_bar = (gates_bar @ params.gates_weight.T) * (features > 0)

    def weight(left: Array, right: Array) -> Array:
        if by_episode:
            return jnp.einsum("t...i,t...j->...ij", left, right)
        left, right = (x.reshape(-1, x.shape[-1]) for x in (left, right))
        over_rows = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(left, right, over_rows)  # left.T @ right would copy on the CPU

    def bias(right: Array) -> Array:
        return right.sum(0) if by_episode else right.reshape(-1, right.shape[-1]).sum(0)

    return Parameters(
        input_weight=jnp.concatenate([weight(x, features_bar) for x in inputs], axis=-2),
        input_bias=bias(features_bar),
        gates_weight=weight(features, gates_bar),
        gates_bias=bias(gates_bar),
        recurrent_weight=weight(before, recurrent_bar),
        candidate_bias=bias(bar * by_recalled),
        output_weight=weight(memories, q_bar),
        output_bias=bias(q_bar),
    )


@jax.custom_vjp
def values(params: Parameters, inputs: Inputs) -> Array:
    """Return the Q-values of `unroll`, differentiable by the parameters with `gradient`."""
    return unroll(params, inputs)[0]


def _values_forward(params: Parameters, inputs: Inputs) -> tuple[Array, Any]:
    q, trace = unroll(params, inputs)
    return q, (params, inputs, trace)


def _values_backward(residuals: Any, q_bar: Array) -> tuple[Parameters, None]:
    params, inputs, trace = residuals
    return gradient(params, inputs, trace, q_bar), None


values.defvjp(_values_forward, _values_backward)


def _at(t: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, t, 0, keepdims=False), tree)


def _put(t: Array, rows: Array, row: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(rows, row, t, 0)


def _thirds(x: Array) -> Gates:
    reset, update, candidate = jnp.split(x, 3, axis=-1)
    return reset, update, candidate


def _input_gates(params: Parameters, inputs: Inputs) -> tuple[Array, Gates]:
    """Return the features (..., H) and their inputs to the GRU's three gates."""
    observation, last_action = inputs
    by_observation, by_action = jnp.split(params.input_weight, [observation.shape[-1]])
    features = jax.nn.relu(
        observation @ by_observation + last_action @ by_action + params.input_bias
    )
    weights, biases = _thirds(params.gates_weight), _thirds(params.gates_bias)
    reset, update, candidate = (features @ w + b for w, b in zip(weights, biases, strict=True))
    return features, (reset, update, candidate)


def _gru_step(
    params: Parameters, memory: Array, gates: Gates
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    reset_h, update_h, candidate_h = _thirds(memory @ params.recurrent_weight)
    reset = jax.nn.sigmoid(gates[0] + reset_h)
    update = jax.nn.sigmoid(gates[1] + update_h)
    recalled = candidate_h + params.candidate_bias
    candidate = jnp.tanh(gates[2] + reset * recalled)
    return (1 - update) * candidate + update * memory, (reset, update, candidate, recalled)
