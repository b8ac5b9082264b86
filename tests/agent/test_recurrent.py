"""The recurrent network: its start, its memory, and its hand-written derivative."""

import jax
import jax.numpy as jnp
import numpy as np
from one_agent import KEY, A, H, T, episode

from pevdn.agent import learning, recurrent


def test_weights_start_orthogonal_and_biases_zero(params):
    assert np.allclose(params.input_weight.T @ params.input_weight, jnp.eye(H), atol=1e-5)
    for gate in jnp.split(params.recurrent_weight, 3, axis=1):
        assert np.allclose(gate.T @ gate, jnp.eye(H), atol=1e-5)
    assert not params.output_bias.any()
    assert not params.gates_bias.any()


def test_the_paper_sized_network_has_31_thousand_parameters():
    big = recurrent.initialise(KEY, 75, 8, 64)
    assert 30_000 < sum(x.size for x in big) < 32_000


def test_acting_step_by_step_gives_the_values_of_the_unrolled_network(params):
    batch = episode(1, 3)
    last = jnp.concatenate([jnp.full((1, 3), -1), batch.actions.astype(int)])
    unrolled, _ = recurrent.unroll(params, recurrent.encode(batch.observations, last, A))
    memory = recurrent.initial_memory(params, 3)
    for t in range(T + 1):
        memory, q = recurrent.step(params, memory, batch.observations[t], last[t])
        assert np.allclose(q, unrolled[t], atol=1e-5)


def test_values_depend_on_the_past(params):
    batch = episode(2)
    last = jnp.full(T + 1, -1)
    changed = batch.observations.at[0].add(1.0)
    before, _ = recurrent.unroll(params, recurrent.encode(batch.observations, last, A))
    after, _ = recurrent.unroll(params, recurrent.encode(changed, last, A))
    assert not np.allclose(before[-1], after[-1])


def test_the_hand_written_derivative_is_the_derivative(params):
    """Against automatic differentiation of acting step by step, single episodes and batches."""

    def plain(params, observations, last):
        memory = recurrent.initial_memory(params, *observations.shape[1:-1])
        values = []
        for seen, action in zip(observations, last, strict=True):
            memory, q = recurrent.step(params, memory, seen, action)
            values.append(q)
        return jnp.stack(values)

    for batch in (episode(3), episode(3, 2)):
        last = jnp.zeros(batch.available.shape[:-1], int)
        weights = jax.random.normal(KEY, (*last.shape, A))
        inputs = recurrent.encode(batch.observations, last, A)
        ours = jax.grad(lambda p: jnp.sum(weights * recurrent.values(p, inputs) ** 2))(params)  # noqa: B023
        theirs = jax.grad(lambda p: jnp.sum(weights * plain(p, batch.observations, last) ** 2))(  # noqa: B023
            params
        )
        for a, b in zip(ours, theirs, strict=True):
            assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_by_episode_are_those_of_each_episode_alone(params):
    batch = episode(8, 3)
    inputs = learning.network_inputs(batch)
    q_bar = jax.random.normal(KEY, (T + 1, 3, A))

    def of(inputs, q_bar, **how):
        trace = recurrent.unroll(params, inputs)[1]
        return recurrent.gradient(params, inputs, trace, q_bar, **how)

    together = of(inputs, q_bar, by_episode=True)
    for i in range(3):
        alone = of(jax.tree.map(lambda x: x[:, i], inputs), q_bar[:, i])  # noqa: B023
        for a, b in zip(together, alone, strict=True):
            assert np.allclose(a[i], b, rtol=1e-4, atol=1e-5)
    for a, b in zip(together, of(inputs, q_bar), strict=True):
        assert np.allclose(a.sum(0), b, rtol=1e-4, atol=1e-5)
