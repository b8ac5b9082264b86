"""The entity network: its derivative, its symmetry, and its size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_agent import KEY, H, T

from pevdn.agent import entities, learning, networks, recurrent, replay
from pevdn.worlds.interface import AgentSpec, EntityGroup

SPECS = {
    "battle": AgentSpec(11, 5, (EntityGroup(0, 2, 2), EntityGroup(4, 3, 2, actions=2))),
    "two kinds of targets": AgentSpec(
        9, 6, (EntityGroup(2, 2, 2, actions=0), EntityGroup(6, 3, 1, 3))
    ),
    "nothing but things": AgentSpec(4, 2, (EntityGroup(0, 2, 2, actions=0),)),
    "nothing known": AgentSpec(5, 4),
}


def seeing(spec: AgentSpec, *batch: int) -> tuple[entities.Parameters, recurrent.Inputs]:
    """A network off its starting point, and what it sees: everything but the first thing."""
    params = entities.initialise(KEY, spec, H)
    keys = iter(jax.random.split(KEY, 99))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    seen = jax.random.normal(next(keys), (T, *batch, spec.observation_size))
    for group in spec.entities[:1]:
        seen = seen.at[..., group.start : group.start + group.size].set(0.0)
    return params, recurrent.Inputs(seen, jnp.zeros((T, *batch, spec.n_actions)))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_derivative_of_the_entity_network_is_the_derivative(spec):
    params, inputs = seeing(spec, 3)
    q_bar = jax.random.normal(KEY, (T, 3, spec.n_actions))

    def total(params, seen, q_bar):
        return jnp.sum(q_bar * entities.values(params, recurrent.Inputs(seen, inputs.last_action)))

    @jax.jit
    def both(params):
        trace = entities.unroll(params, inputs)[1]
        ours = entities.gradient(params, inputs, trace, q_bar)
        ours_each = entities.gradient(params, inputs, trace, q_bar, by_episode=True)
        each = jax.vmap(jax.grad(total), (None, 1, 1))(params, inputs.observation, q_bar)
        return (ours, jax.grad(total)(params, inputs.observation, q_bar)), (ours_each, each)

    for a, b in both(params):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.shape == y.shape
            assert np.allclose(x, y, rtol=1e-4, atol=1e-4)


def test_what_is_said_of_one_enemy_holds_for_every_enemy():
    """Change places of two enemies: the values of attacking them do so too, the rest stays."""
    params, inputs = seeing(SPECS["battle"])
    order = jnp.array([0, 1, 2, 3, 6, 7, 4, 5, 8, 9, 10])  # the first two enemies
    swapped = recurrent.Inputs(inputs.observation[..., order], inputs.last_action)
    q, q_swapped = (entities.values(params, x) for x in (inputs, swapped))
    assert np.allclose(q[..., jnp.array([0, 1, 3, 2, 4])], q_swapped, atol=1e-5)
    assert not np.allclose(q[..., 2], q[..., 3])


def test_a_thing_that_is_not_seen_adds_nothing_to_the_core():
    """Three enemies of which one is unseen, and a world of the other two: the same moves."""
    params, inputs = seeing(SPECS["battle"])
    hidden = inputs.observation.at[..., 8:10].set(0.0)
    fewer = dataclasses.replace(
        params, spec=AgentSpec(9, 4, (EntityGroup(0, 2, 2), EntityGroup(4, 2, 2, actions=2)))
    )
    q = entities.values(params, recurrent.Inputs(hidden, inputs.last_action))
    kept = jnp.array([0, 1, 2, 3, 4, 5, 6, 7, 10])
    q_fewer = entities.values(fewer, recurrent.Inputs(hidden[..., kept], inputs.last_action))
    assert np.allclose(q[..., :4], q_fewer, atol=1e-5)


def test_a_group_of_no_things_changes_nothing_of_what_is_the_agents_own():
    """Wherever it is said to start, own numbers are those that belong to no thing."""
    some, none = EntityGroup(0, 2, 3), EntityGroup(0, 0, 3)
    for groups in ((some, none), (none, some)):
        params = entities.initialise(KEY, AgentSpec(8, 4, groups), H)
        assert params.own.weight.shape == (2, H)


def test_entities_on_3m_have_a_fifth_of_the_parameters_and_act_as_they_learn():
    spec = AgentSpec(75, 8, (EntityGroup(0, 2, 13), EntityGroup(26, 3, 13, actions=5)))
    params = networks.initialise("entities", KEY, spec, 32)
    assert sum(x.size for x in jax.tree.leaves(params)) == 6630
    seen = jax.random.normal(KEY, (T, 75))
    q = networks.of(params).values(params, recurrent.Inputs(seen, jnp.zeros((T, 8))))
    memory = networks.of(params).initial_memory(params)
    for t in range(T):
        memory, now = networks.of(params).step(params, memory, seen[t], jnp.int32(-1))
        assert np.allclose(now, q[t], atol=1e-5)


def test_messages_without_gradients_compile_for_many_agents_of_a_battle():
    """XLA 0.10 on the CPU crashed here while online and target network were mapped as one."""
    spec = AgentSpec(75, 8, (EntityGroup(0, 2, 13), EntityGroup(26, 3, 13, actions=5)))
    lanes, agents, episodes, steps = 4, 3, 32, 60
    keys = jax.random.split(KEY, (lanes, agents))
    start = jax.vmap(jax.vmap(lambda key: entities.initialise(key, spec, 16)))
    rows = jax.eval_shape(lambda: replay.time_first(replay.empty(episodes - 1, steps, 75, 8)))
    batch = jax.tree.map(lambda x: jnp.ones((lanes, agents, *x.shape), x.dtype), rows)

    def sent(params, batch):
        return learning.message(params, params, batch, 0.99, True, 0.3)[0]

    messages = jax.jit(jax.vmap(jax.vmap(sent)))(jax.jit(start)(keys), batch)
    assert messages.shape == (lanes, agents, steps, episodes) and np.isfinite(messages).all()
