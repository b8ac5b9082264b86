"""Random keys: every number that training draws has a key of its own."""

import jax
import numpy as np

from pevdn.agent import keys

MAX_STEPS, EPISODES, UPDATES, AGENTS, BLOCKS = 7, 5, 3, 4, 3


def data(key) -> list[bytes]:
    """The key or keys as bytes."""
    rows = np.asarray(jax.random.key_data(key))
    return [row.tobytes() for row in rows.reshape(-1, rows.shape[-1])]


def drawn(seed: int) -> list[bytes]:
    """All keys that the first blocks of a training draw from; those that derive others are not."""
    found = []
    training, for_agents = keys.of_lane(jax.random.key(seed))
    found += data(keys.of_agents(for_agents, AGENTS))
    for _ in range(BLOCKS):
        training, episodes, updates = keys.of_block(training, EPISODES, UPDATES)
        for episode in episodes:
            found += data(keys.of_reset(episode, MAX_STEPS))
            for t in range(MAX_STEPS):
                for key in keys.of_step(episode, t):
                    found += data(key)
        for update in updates:
            found += data(update[keys.COIN]) + data(update[keys.MINIBATCH])
            found += data(update[keys.SHARES])
            found += data(keys.of_agents(update[keys.NOISE], AGENTS))
    return found


def test_no_key_serves_two_purposes():
    both = drawn(0) + drawn(1)
    assert len(set(both)) == len(both) > 200


def test_evaluations_share_no_key_with_training_or_with_each_other():
    evaluations = [
        x for seed in (0, 1) for n in range(9) for x in data(keys.of_evaluation(seed, n))
    ]
    assert len(set(evaluations)) == len(evaluations)
    assert not set(evaluations) & set(drawn(0) + drawn(1))


def test_the_purposes_of_an_update_are_four():
    assert sorted({keys.COIN, keys.MINIBATCH, keys.SHARES, keys.NOISE}) == [0, 1, 2, 3]
