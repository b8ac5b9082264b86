"""Minibatches: every stored episode at the right rate, from uniform words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from pevdn.exchange import sampling

KEY = jax.random.key(0)
ERROR_RATE = 1e-6  # a statistical test fails on correct code once in a million runs


def words(key, capacity):
    return jax.random.bits(key, (capacity,), jnp.uint32)


def test_uniform_indices_are_different_filled_slots():
    for seed in range(20):
        chosen = np.asarray(sampling.uniform(words(jax.random.key(seed), 100), 40, 32))
        assert len(set(chosen)) == 32
        assert chosen.max() < 40


def test_every_slot_is_drawn_equally_often():
    draw = jax.vmap(lambda key: sampling.uniform(words(key, 25), 20, 5))
    chosen = np.asarray(draw(jax.random.split(KEY, 40_000)))
    counts = np.bincount(chosen.ravel(), minlength=25)
    assert np.all(counts[20:] == 0)
    assert chisquare(counts[:20]).pvalue > ERROR_RATE


def test_poisson_takes_each_filled_slot_independently_at_the_rate():
    draw = jax.vmap(lambda key: sampling.poisson(words(key, 64), 60, 0.25))
    slots = np.asarray(draw(jax.random.split(KEY, 20_000)))
    sampled = slots != 64  # the scratch slot stands for "not sampled"
    assert np.all(slots[sampled] == np.nonzero(sampled)[1])
    assert not sampled[:, 60:].any()
    z = (sampled[:, :60].mean(0) - 0.25) / np.sqrt(0.25 * 0.75 / 20_000)
    assert np.abs(z).max() < 5.5
    pairs = np.corrcoef(sampled[:, :60].T) - np.eye(60)
    assert np.abs(pairs).max() * np.sqrt(20_000) < 5.5  # 1770 pairs: error rate below 1e-4


@pytest.mark.parametrize("rate", [0.7, 1 / 3, 2.0**-32, 1.0])
def test_no_episode_is_sampled_more_often_than_is_accounted_for(rate):
    """Of the 2³² words, those that sample an episode are at most q · 2³²."""
    largest = int(np.floor(rate * 2**32))
    edge = jnp.array([max(0, largest - 1), min(largest, 2**32 - 1)], jnp.uint32)
    assert sampling.poisson(edge, 2, rate).tolist() == ([0, 2] if rate < 1 else [0, 1])
