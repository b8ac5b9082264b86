"""Messages, team errors and gradients by their equations; then teams that learn two tiny games."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_agent import A, T, episode
from support import slow

from pevdn import worlds
from pevdn.agent import learning, networks, recurrent
from pevdn.config import experiment as config
from pevdn.simulation.program import Simulation
from pevdn.training.evaluator import evaluation_keys


@pytest.mark.parametrize("double_q", [True, False])
def test_the_message_is_equation_8(params, double_q):
    target = jax.tree.map(lambda x: x + 0.1, params)
    batch = episode(4)
    last = jnp.concatenate([jnp.array([-1]), batch.actions.astype(int)])
    inputs = recurrent.encode(batch.observations, last, A)
    q = np.asarray(recurrent.unroll(params, inputs)[0])
    q_target = np.asarray(recurrent.unroll(target, inputs)[0])
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
        return m, learning.local_gradient(params, memo, learning.team_error(m, batch), batch)

    for a, b in zip(jax.tree.leaves(both(batch)), jax.tree.leaves(both(junk)), strict=True):
        assert np.allclose(a, b, atol=1e-6)


def test_the_local_gradient_is_that_of_the_squared_error_averaged_along_the_episode(params):
    batch = episode(7)
    m, memo = learning.message(params, params, batch, 0.9, True)
    ours = learning.local_gradient(params, memo, learning.team_error(m, batch), batch)
    inputs = learning.network_inputs(batch)

    def taken(p):
        return learning.of_taken(recurrent.values(p, inputs)[:-1], batch)

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


# ---- whole teams: they learn what they can and no more, a minute in all ---------------------

SETTINGS = {
    "hidden_size": 16,
    "buffer_size": 500,
    "learning_rate": 2e-3,
    "target_rate": 0.02,
    "eval_episodes": 64,
    "exploration_end": 1.0,  # uniform exploration all along: the best case for the additive fit
}
SEEDS = 3


def returns(algorithm: str, env: str, steps: int, **settings) -> np.ndarray:
    """Greedy return of each seed after training."""
    world = worlds.make(env)
    sim = Simulation(world, config.make(algorithm, env, settings={**SETTINGS, **settings}))
    seeds = jnp.arange(SEEDS)
    state = jax.jit(sim.start)(seeds)
    state = jax.jit(sim.advance)(state, jnp.int32(steps), jnp.int32(10**6))
    assert not np.any(state.refused)
    params = tuple(learner.params for learner in state.learners)
    score = jax.jit(sim.evaluate)(params, evaluation_keys(seeds, 0))
    return np.asarray(score.total_reward)


LEARNERS = [slow("vdn"), slow("pe-vdn-a"), "pe-vdn-b"]


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_value_decomposition_reaches_the_optimum_of_the_coordination_game(algorithm):
    """Every seed recalls every cue; a memoryless team gets 0.83 on average."""
    world = worlds.make("toy:coordination")
    assert returns(algorithm, world.name, 4000) == pytest.approx(world.optimum)
    assert world.best_memoryless < world.optimum - 1


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_an_additive_value_settles_at_7_of_8_in_the_two_step_game(algorithm):
    assert returns(algorithm, "toy:two-step", 4000, gamma=0.99) == pytest.approx(7.0)


def test_a_private_team_learns_when_the_noise_is_small_and_does_not_when_it_drowns():
    settings = {
        **{"learning_starts": 50, "network": "recurrent"},
        **{"update_every": 1, "parallel_episodes": 8, "learning_rate_end": 1.0},
        **{"buffer_size": 200, "expected_batch_size": 16, "hidden_size": 8, "clip_norm": 1.0},
    }
    mild = returns("pe-vdn-c", "toy:coordination", 4000, noise_multiplier=0.1, **settings)
    wild = returns("pe-vdn-c", "toy:coordination", 1000, noise_multiplier=100.0, **settings)
    assert mild.mean() > 1.7
    assert wild.mean() < 1.5
