"""The replay buffer: eviction, and the scratch slot that pads minibatches."""

import jax
import jax.numpy as jnp
from one_agent import A, O, T, episode

from pevdn.agent import replay, schedule


def test_the_newest_episode_replaces_the_oldest():
    rows = replay.empty(4, T, O, A)
    for number in range(0, 6, 2):
        pair = episode(number, 2)._replace(rewards=jnp.full((T, 2), float(number)))
        pair = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, pair)
        rows = replay.store(rows, schedule.slots(jnp.int32(number), jnp.arange(2), 4), pair)
    assert rows.rewards[:4, 0].tolist() == [4.0, 4.0, 2.0, 2.0]


def test_padding_reads_as_an_empty_episode_whatever_is_in_the_scratch_slot():
    rows = replay.empty(3, T, O, A)
    rows = rows._replace(length=rows.length + 5)
    batch = replay.fetch(rows, jnp.array([0, 3, 2]), T)
    assert batch.length.tolist() == [5, 0, 5]
