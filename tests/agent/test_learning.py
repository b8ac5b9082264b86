"""Teams learn what they can and no more: two tiny games with known answers, a minute in all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import slow

from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.simulation.program import Simulation
from pevdn.training.loop import evaluation_keys

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
