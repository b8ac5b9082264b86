"""Greedy and exploring choices among the available actions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_agent import KEY
from scipy.stats import chisquare

from pevdn.agent import acting


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
