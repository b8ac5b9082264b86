"""Settings that differ by lane: one program trains what a program for each setting would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pevdn import worlds
from pevdn.agent.program import BY_LANE
from pevdn.config import experiment as config
from pevdn.simulation.program import Simulation

SETTINGS = {
    "hidden_size": 8,
    "buffer_size": 24,
    "expected_batch_size": 6,
    "parallel_episodes": 2,
    "update_every": 1,
    "learning_starts": 6,
    "eval_episodes": 4,
    "exploration_steps": 20,
    "average_decay": 0.9,
}
VARIANTS = {  # two values for every setting that may differ
    "gamma": (0.9, 0.5),
    "learning_rate": (1e-2, 1e-3),
    "momentum": (0.9, 0.5),
    "weight_decay": (0.0, 0.1),
    "target_rate": (0.1, 0.5),
    "return_lambda": (0.0, 0.6),
    "reward_cap": (0.0, 3.0),
    "learning_rate_end": (0.5, 0.1),
    "learning_rate_steps": (40, 200),
    "average_decay": (0.9, 0.5),
    "exploration_start": (1.0, 0.5),
    "exploration_end": (0.5, 0.05),
    "exploration_steps": (20, 80),
    "noise_multiplier": (0.5, 1.5),
    "clip_norm": (0.1, 1.0),
    "message_norm": (0.5, 0.1),
    "opening_noise": (0.5, 1.5),
    "anchor_penalty": (0.0, 0.1),
}
PRIVATE, NOISED = ("noise_multiplier", "clip_norm"), ("message_norm", "opening_noise")
UNUSED = {"pe-vdn-b": PRIVATE + NOISED, "vdn": PRIVATE + NOISED, "pe-vdn-c": NOISED, "pe-vdn-d": ()}


def test_every_setting_that_may_differ_is_tried_here():
    assert set(VARIANTS) == set(BY_LANE)


def trained(algorithm, seeds, settings, lane_settings=()):
    wanted = config.make(algorithm, "toy:two-step", seeds=seeds, settings=settings)
    sim = Simulation(worlds.make("toy:two-step"), wanted, None, lane_settings)
    state = jax.jit(sim.start)(jnp.full(seeds, 7))  # equal seeds: only settings tell lanes apart
    anchored = jnp.ones(seeds, bool)
    state = jax.jit(sim.advance)(state._replace(anchored=anchored), jnp.int32(60), jnp.int32(100))
    assert np.all(state.updates > 20)
    return state


def params(state, lane):
    return np.concatenate([np.ravel(np.asarray(x)[lane]) for x in jax.tree.leaves(state.params)])


@pytest.mark.parametrize("algorithm", UNUSED)
def test_a_lane_learns_what_a_program_of_its_own_settings_learns(algorithm):
    """Every numeric setting at once, two lanes: each equals a training with constants."""
    names = [n for n in VARIANTS if n not in UNUSED[algorithm]]
    base = {**SETTINGS, "network": "recurrent", "anchor": True}
    variants = [{name: VARIANTS[name][lane] for name in names} for lane in range(2)]
    together = trained(algorithm, 2, base, variants)
    for lane, own in enumerate(variants):
        alone = trained(algorithm, 1, {**base, **own})
        for counter in ("env_steps", "episodes", "updates", "exposure"):
            assert getattr(together, counter)[lane] == getattr(alone, counter)[0]
        ours, theirs = params(together, lane), params(alone, 0)
        # Coefficients in float32 instead of folded constants: the last bits may differ.
        assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs)


def test_every_setting_makes_a_difference_between_lanes():
    """A lane for every setting, in which it alone has its second value, beside the first of all."""
    base = {**SETTINGS, "network": "recurrent", "anchor": True}
    first = {name: values[0] for name, values in VARIANTS.items()}
    lanes = [first, *({**first, name: VARIANTS[name][1]} for name in VARIANTS)]
    state = trained("pe-vdn-d", len(lanes), base, lanes)
    averages = state._replace(learners=tuple(x._replace(params=x.average) for x in state.learners))
    for lane, name in enumerate(VARIANTS, 1):
        shown = averages if name == "average_decay" else state
        assert not np.array_equal(params(shown, 0), params(shown, lane)), name


def test_lanes_without_noise_and_with_noise_share_a_program():
    variants = [{"noise_multiplier": 0.0}, {"noise_multiplier": 1.0}]
    base = {**SETTINGS, "network": "recurrent"}
    together = trained("pe-vdn-c", 2, base, variants)
    alone = trained("pe-vdn-c", 1, {**base, "noise_multiplier": 0.0})
    ours, theirs = params(together, 0), params(alone, 0)
    assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs)
    assert np.linalg.norm(params(together, 1) - theirs) > 0.01 * np.linalg.norm(theirs)


@pytest.mark.parametrize("setting", ["noise_multiplier", "clip_norm"])
def test_lanes_of_an_algorithm_without_privacy_ignore_settings_of_privacy(setting):
    base = {**SETTINGS, "network": "recurrent"}
    state = trained("pe-vdn-b", 2, base, [{setting: 0.5}, {setting: 2.0}])
    assert np.array_equal(params(state, 0), params(state, 1))
    assert np.allclose(params(state, 0), params(trained("pe-vdn-b", 1, base), 0), rtol=1e-4)


def test_lanes_may_all_be_without_noise():
    base = {**SETTINGS, "network": "recurrent"}
    trained("pe-vdn-c", 2, base, [{"noise_multiplier": 0.0}, {"noise_multiplier": 0.0}])
