"""What one agent computes: network, memory, choices, messages."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import chisquare

import pevdn.agent.acting
import pevdn.agent.entities
import pevdn.agent.learning
import pevdn.agent.recurrent
import pevdn.agent.replay
from pevdn.agent import acting, entities, learning, networks, replay
from pevdn.agent import recurrent as network
from pevdn.agent.replay import Episode
from pevdn.worlds.base import AgentSpec, EntityGroup

KEY = jax.random.key(0)
O, A, H, T = 5, 4, 8, 6


@pytest.fixture(scope="module")
def params():
    return network.initialise(KEY, O, A, H)


def episode(seed: int, *batch: int, length=None) -> Episode:
    rng = np.random.default_rng(seed)
    length = rng.integers(1, T + 1, batch) if length is None else np.broadcast_to(length, batch)
    available = rng.random((T + 1, *batch, A)) < 0.7
    available[..., 0] = True
    return Episode(
        observations=jnp.asarray(rng.normal(size=(T + 1, *batch, O)), jnp.float32),
        available=jnp.asarray(available),
        actions=jnp.asarray(rng.integers(0, A, (T, *batch)), jnp.int16),
        rewards=jnp.asarray(rng.normal(size=(T, *batch)), jnp.float32),
        terminal=jnp.asarray(np.arange(T).reshape(-1, *([1] * len(batch))) == length - 1),
        length=jnp.asarray(length, jnp.int32),
    )


# ---- network ------------------------------------------------------------------------------


def test_weights_start_orthogonal_and_biases_zero(params):
    assert np.allclose(params.input_weight.T @ params.input_weight, jnp.eye(H), atol=1e-5)
    for gate in jnp.split(params.recurrent_weight, 3, axis=1):
        assert np.allclose(gate.T @ gate, jnp.eye(H), atol=1e-5)
    assert not params.output_bias.any()
    assert not params.gates_bias.any()


def test_the_paper_sized_network_has_31_thousand_parameters():
    big = network.initialise(KEY, 75, 8, 64)
    assert 30_000 < sum(x.size for x in big) < 32_000


def test_acting_step_by_step_gives_the_values_of_the_unrolled_network(params):
    batch = episode(1, 3)
    last = jnp.concatenate([jnp.full((1, 3), -1), batch.actions.astype(int)])
    unrolled, _ = network.unroll(params, network.encode(batch.observations, last, A))
    memory = network.initial_memory(params, 3)
    for t in range(T + 1):
        memory, q = network.step(params, memory, batch.observations[t], last[t])
        assert np.allclose(q, unrolled[t], atol=1e-5)


def test_values_depend_on_the_past(params):
    batch = episode(2)
    last = jnp.full(T + 1, -1)
    changed = batch.observations.at[0].add(1.0)
    before, _ = network.unroll(params, network.encode(batch.observations, last, A))
    after, _ = network.unroll(params, network.encode(changed, last, A))
    assert not np.allclose(before[-1], after[-1])


def test_the_hand_written_derivative_is_the_derivative(params):
    """Against automatic differentiation of acting step by step, single episodes and batches."""

    def plain(params, observations, last):
        memory = network.initial_memory(params, *observations.shape[1:-1])
        values = []
        for seen, action in zip(observations, last, strict=True):
            memory, q = network.step(params, memory, seen, action)
            values.append(q)
        return jnp.stack(values)

    for batch in (episode(3), episode(3, 2)):
        last = jnp.zeros(batch.available.shape[:-1], int)
        weights = jax.random.normal(KEY, (*last.shape, A))
        inputs = network.encode(batch.observations, last, A)
        ours = jax.grad(lambda p: jnp.sum(weights * network.values(p, inputs) ** 2))(params)  # noqa: B023
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
        trace = network.unroll(params, inputs)[1]
        return network.gradient(params, inputs, trace, q_bar, **how)

    together = of(inputs, q_bar, by_episode=True)
    for i in range(3):
        alone = of(jax.tree.map(lambda x: x[:, i], inputs), q_bar[:, i])  # noqa: B023
        for a, b in zip(together, alone, strict=True):
            assert np.allclose(a[i], b, rtol=1e-4, atol=1e-5)
    for a, b in zip(together, of(inputs, q_bar), strict=True):
        assert np.allclose(a.sum(0), b, rtol=1e-4, atol=1e-5)


# ---- the network of entities ----------------------------------------------------------------

SPECS = {
    "battle": AgentSpec(11, 5, (EntityGroup(0, 2, 2), EntityGroup(4, 3, 2, actions=2))),
    "two kinds of targets": AgentSpec(
        9, 6, (EntityGroup(2, 2, 2, actions=0), EntityGroup(6, 3, 1, 3))
    ),
    "nothing but things": AgentSpec(4, 2, (EntityGroup(0, 2, 2, actions=0),)),
    "nothing known": AgentSpec(5, 4),
}


def seeing(spec: AgentSpec, *batch: int) -> tuple[entities.Parameters, network.Inputs]:
    """A network off its starting point, and what it sees: everything but the first thing."""
    params = entities.initialise(KEY, spec, H)
    keys = iter(jax.random.split(KEY, 99))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    seen = jax.random.normal(next(keys), (T, *batch, spec.observation_size))
    for group in spec.entities[:1]:
        seen = seen.at[..., group.start : group.start + group.size].set(0.0)
    return params, network.Inputs(seen, jnp.zeros((T, *batch, spec.n_actions)))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_derivative_of_the_entity_network_is_the_derivative(spec):
    params, inputs = seeing(spec, 3)
    q_bar = jax.random.normal(KEY, (T, 3, spec.n_actions))

    def total(params, seen, q_bar):
        return jnp.sum(q_bar * entities.values(params, network.Inputs(seen, inputs.done)))

    @jax.jit
    def both(params):
        trace = entities.unroll(params, inputs)[1]
        ours = entities.gradient(params, inputs, trace, q_bar)
        ours_each = entities.gradient(params, inputs, trace, q_bar, by_episode=True)
        each = jax.vmap(jax.grad(total), (None, 1, 1))(params, inputs.seen, q_bar)
        return (ours, jax.grad(total)(params, inputs.seen, q_bar)), (ours_each, each)

    for a, b in both(params):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.shape == y.shape
            assert np.allclose(x, y, rtol=1e-4, atol=1e-4)


def test_what_is_said_of_one_enemy_holds_for_every_enemy():
    """Change places of two enemies: the values of attacking them do so too, the rest stays."""
    params, inputs = seeing(SPECS["battle"])
    order = jnp.array([0, 1, 2, 3, 6, 7, 4, 5, 8, 9, 10])  # the first two enemies
    swapped = network.Inputs(inputs.seen[..., order], inputs.done)
    q, q_swapped = (entities.values(params, x) for x in (inputs, swapped))
    assert np.allclose(q[..., jnp.array([0, 1, 3, 2, 4])], q_swapped, atol=1e-5)
    assert not np.allclose(q[..., 2], q[..., 3])


def test_a_thing_that_is_not_seen_adds_nothing_to_the_core():
    """Three enemies of which one is unseen, and a world of the other two: the same moves."""
    params, inputs = seeing(SPECS["battle"])
    hidden = inputs.seen.at[..., 8:10].set(0.0)
    fewer = dataclasses.replace(
        params, spec=AgentSpec(9, 4, (EntityGroup(0, 2, 2), EntityGroup(4, 2, 2, actions=2)))
    )
    q = entities.values(params, network.Inputs(hidden, inputs.done))
    kept = jnp.array([0, 1, 2, 3, 4, 5, 6, 7, 10])
    q_fewer = entities.values(fewer, network.Inputs(hidden[..., kept], inputs.done))
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
    q = networks.of(params).values(params, network.Inputs(seen, jnp.zeros((T, 8))))
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


# ---- acting -------------------------------------------------------------------------------


def test_greedy_never_takes_an_unavailable_action():
    q = jnp.array([[9.0, 1.0, 2.0], [-5.0, -7.0, 0.0]])
    available = jnp.array([[False, True, True], [True, True, False]])
    assert acting.greedy(q, available).tolist() == [2, 0]


def test_exploration_is_uniform_over_what_is_available_and_epsilon_often():
    q = jnp.array([0.0, 5.0, 1.0, 0.0])
    available = jnp.array([True, True, False, True])
    draw = jax.vmap(lambda chance: acting.epsilon_greedy(chance, q, available, 0.6))
    counts = np.bincount(draw(jax.random.uniform(KEY, (30_000, 2))), minlength=4)
    assert counts[2] == 0
    expected = 30_000 * np.array([0.2, 0.4 + 0.2, 0.2])
    assert chisquare(counts[[0, 1, 3]], expected).pvalue > 1e-6


def test_exploration_reaches_the_first_and_the_last_available_action_and_no_other():
    available = jnp.array([False, True, False, True, False])
    for chance, action in ((0.0, 1), (0.4999, 1), (0.5, 3), (0.99999994, 3)):
        choice = acting.epsilon_greedy(jnp.array([0.0, chance]), jnp.zeros(5), available, 1.0)
        assert int(choice) == action


def test_exploration_falls_along_a_line_and_stays():
    at = lambda n: float(acting.exploration(jnp.int32(n), 1.0, 0.05, 1000))  # noqa: E731
    assert [at(0), at(1000), at(5000)] == pytest.approx([1.0, 0.05, 0.05])
    assert at(500) == pytest.approx(0.525)


# ---- replay -------------------------------------------------------------------------------


def test_the_newest_episode_replaces_the_oldest():
    rows = replay.empty(4, T, O, A)
    for number in range(0, 6, 2):
        pair = episode(number, 2)._replace(rewards=jnp.full((T, 2), float(number)))
        pair = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, pair)
        rows = replay.store(rows, replay.slots_for(jnp.int32(number), 2, 4), pair)
    assert rows.rewards[:4, 0].tolist() == [4.0, 4.0, 2.0, 2.0]


def test_padding_reads_as_an_empty_episode_whatever_is_in_the_scratch_slot():
    rows = replay.empty(3, T, O, A)
    rows = rows._replace(length=rows.length + 5)
    batch = replay.fetch(rows, jnp.array([0, 3, 2]), T)
    assert batch.length.tolist() == [5, 0, 5]


# ---- learning -----------------------------------------------------------------------------


@pytest.mark.parametrize("double_q", [True, False])
def test_the_message_is_equation_8(params, double_q):
    target = jax.tree.map(lambda x: x + 0.1, params)
    batch = episode(4)
    last = jnp.concatenate([jnp.array([-1]), batch.actions.astype(int)])
    inputs = network.encode(batch.observations, last, A)
    q = np.asarray(network.unroll(params, inputs)[0])
    q_target = np.asarray(network.unroll(target, inputs)[0])
    m, _ = learning.message(params, target, batch, 0.9, double_q)
    for t in range(T):
        if t >= int(batch.length):
            assert float(m[t]) == 0
            continue
        open_ = np.flatnonzero(batch.available[t + 1])
        chooser = q if double_q else q_target
        best = q_target[t + 1, open_[np.argmax(chooser[t + 1, open_])]]
        bootstrap = 0.0 if bool(batch.terminal[t]) else best
        expected = 0.9 * bootstrap - q[t, int(batch.actions[t])]
        assert float(m[t]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_team_error_with_lambda_is_that_of_the_lambda_return(params, terminal):
    """Against the definition: G_t = r_t + γ ((1 − λ) V_{t+1} + λ G_{t+1}), for two agents."""
    gamma, lam, length = 0.9, 0.6, 4
    first = episode(14, length=length)
    second = episode(15, length=length)._replace(rewards=first.rewards)
    both = [
        batch._replace(terminal=batch.terminal & terminal, rewards=first.rewards.at[4:].set(99.0))
        for batch in (first, second)
    ]
    messages = [learning.message(params, params, b, gamma, True, lam)[0] for b in both]
    error = learning.team_error(sum(messages), both[0], gamma * lam)

    q = [networks.of(params).values(params, learning.network_inputs(b)) for b in both]
    value = sum(learning.next_values(x, x, b, True) for x, b in zip(q, both, strict=True))
    taken = sum(learning.of_taken(x[:-1], b) for x, b in zip(q, both, strict=True))
    returned = float(value[length - 1])  # beyond the end there is the last value alone
    for t in reversed(range(length)):
        after = (1 - lam) * float(value[t]) + lam * returned
        returned = float(first.rewards[t]) + gamma * after
        assert float(error[t]) == pytest.approx(returned - float(taken[t]), abs=1e-4)
    assert not error[length:].any()


def test_what_the_clock_ended_is_bootstrapped_and_what_the_game_ended_is_not(params):
    batch = episode(5, length=T)
    cut = batch._replace(terminal=jnp.zeros(T, bool))
    ended, _ = learning.message(params, params, batch, 0.9, True)
    truncated, _ = learning.message(params, params, cut, 0.9, True)
    assert np.allclose(ended[:-1], truncated[:-1])
    assert float(ended[-1]) != pytest.approx(float(truncated[-1]), abs=1e-4)


def test_padding_after_the_end_changes_neither_message_nor_gradient(params):
    batch = episode(6, length=3)
    junk = batch._replace(
        observations=batch.observations.at[4:].set(99.0), rewards=batch.rewards.at[3:].set(99.0)
    )

    def both(batch):
        m, memo = learning.message(params, params, batch, 0.9, True)
        return m, learning.local_gradient(params, memo, m, batch)

    for a, b in zip(jax.tree.leaves(both(batch)), jax.tree.leaves(both(junk)), strict=True):
        assert np.allclose(a, b, atol=1e-6)


def test_the_local_gradient_is_that_of_the_squared_error_averaged_along_the_episode(params):
    batch = episode(7)
    m, memo = learning.message(params, params, batch, 0.9, True)
    ours = learning.local_gradient(params, memo, m, batch)
    inputs = learning.network_inputs(batch)

    def taken(p):
        return learning.of_taken(network.values(p, inputs)[:-1], batch)

    def loss(p):
        q = taken(p)
        constant = jax.lax.stop_gradient(m + taken(params))
        error = (batch.rewards + constant - q) * learning.valid(batch)
        return jnp.sum(error**2) / batch.length

    for a, b in zip(ours, jax.grad(loss)(params), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rate", "moved"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_the_target_follows_softly_or_hard(params, rate, moved):
    optimiser = optax.sgd(1.0)
    learner = learning.begin(params, optimiser)
    gradient = jax.tree.map(jnp.ones_like, params)
    after = learning.improve(learner, gradient, optimiser, learning.Rates(1.0, rate, 0.0))
    assert np.allclose(after.params.input_bias, -1.0)
    assert np.allclose(after.target.input_bias, -moved)


def test_step_size_and_average_move_as_far_as_they_are_told(params):
    optimiser = optax.sgd(1.0)
    learner = learning.begin(params, optimiser)
    gradient = jax.tree.map(jnp.ones_like, params)
    after = learning.improve(learner, gradient, optimiser, learning.Rates(0.25, 0.0, 0.1))
    assert np.allclose(after.params.input_bias, -0.25)
    assert np.allclose(after.average.input_bias, -0.025)
    assert np.allclose(after.target.input_bias, 0.0)


def test_the_anchor_pulls_in_proportion_to_the_distance(params):
    learner = learning.begin(params, optax.sgd(1.0))
    away = learner._replace(params=jax.tree.map(lambda x: x + 3.0, learner.params))
    zero = jax.tree.map(jnp.zeros_like, learner.params)
    pulled = learning.pull_to_anchor(zero, away, 0.5)
    assert np.allclose(pulled.output_bias, 2 * 0.5 * 3.0)


def test_no_agent_function_knows_of_a_team():
    """The package boundary is the privacy boundary: nothing in agent/ imports what joins agents."""
    for module in (
        pevdn.agent.acting,
        pevdn.agent.entities,
        pevdn.agent.learning,
        pevdn.agent.recurrent,
        pevdn.agent.replay,
    ):
        source = inspect.getsource(module)
        for forbidden in ("pevdn.exchange", "pevdn.runtime", "pevdn.worlds", "pevdn.experiment"):
            assert forbidden not in source
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(function).parameters
            assert not {"n_agents", "agents", "team", "teammates"} & set(parameters), name
