"""The compiled agent chooses the minibatches that the team agreed on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pevdn import worlds
from pevdn.config import experiment as configuration
from pevdn.network.compiled_agent import CompiledAgent

CAPACITY = 40


def agent_of(algorithm: str, batch: int) -> CompiledAgent:
    settings: dict[str, Any] = {"buffer_size": CAPACITY, "expected_batch_size": batch}
    settings |= {"hidden_size": 4, "parallel_episodes": 2}
    config = configuration.make(algorithm, "toy:two-step", 1000, settings=settings)
    return CompiledAgent(config, worlds.make("toy:two-step").agents[0], 2, 2)


UNIFORM, POISSON = agent_of("pe-vdn-b", 8), agent_of("pe-vdn-c", 10)
LENGTHS = np.array([2] * CAPACITY + [0], np.int32)


def chosen_by(agent: CompiledAgent, words: Any, filled: int, lengths: Any = LENGTHS) -> list[int]:
    slots = agent.choose(words, filled, lengths)
    return [int(slot) for slot in slots.ravel() if slot != CAPACITY]


def words_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, CAPACITY, np.uint32)


@given(st.integers(0, 2**31), st.sampled_from([8, 23, CAPACITY]))
def test_a_uniform_minibatch_is_the_filled_slots_with_the_largest_words(seed, filled):
    words = words_of(seed)
    largest = np.argsort(~(words[:filled] >> np.uint32(9)), kind="stable")[:8]
    assert chosen_by(UNIFORM, words, filled) == largest.tolist()


def test_of_equal_words_the_first_slots_are_chosen():
    quarters = np.random.default_rng(0).integers(0, 4, CAPACITY).astype(np.uint32)
    order = np.argsort(-quarters.astype(int), kind="stable")
    assert chosen_by(UNIFORM, quarters << np.uint32(30), CAPACITY) == order[:8].tolist()


def test_a_minibatch_of_more_episodes_than_there_are_is_filled_up_with_empty_slots():
    lengths = np.where(np.arange(CAPACITY + 1) < 7, 2, 0).astype(np.int32)
    slots = chosen_by(UNIFORM, words_of(0), 7, lengths)
    assert sorted(slots[:7]) == list(range(7)) and lengths[slots[7:]].sum() == 0


@given(st.integers(0, 2**31), st.integers(0, CAPACITY))
def test_a_poisson_minibatch_is_every_filled_slot_whose_word_is_below_q(seed, filled):
    words = words_of(seed)
    below = np.flatnonzero(words[:filled] < np.uint32(int(10 / CAPACITY * 2**32)))
    assert chosen_by(POISSON, words, filled) == below.tolist()


@pytest.mark.parametrize("batch", [28, 13, 1, CAPACITY])
def test_no_episode_is_sampled_more_often_than_is_accounted_for(batch):
    """Of the 2³² words, those that sample an episode are at most q · 2³²."""
    rate = batch / CAPACITY
    largest = int(np.floor(rate * 2**32))
    edge = np.full(CAPACITY, 2**32 - 1, np.uint32)
    edge[:2] = max(0, largest - 1), min(largest, 2**32 - 1)
    sampled = chosen_by(agent_of("pe-vdn-c", batch), edge, 2)
    assert sampled == ([0] if rate < 1 else [0, 1])
    assert largest / 2**32 <= rate


@given(st.integers(0, 2**31))
def test_the_longest_episodes_of_a_uniform_minibatch_come_first(seed):
    lengths = np.random.default_rng(seed).integers(1, 3, CAPACITY + 1, np.int32)
    lengths[-1] = 0
    in_order = chosen_by(UNIFORM, words_of(seed), CAPACITY)
    by_length = sorted(in_order, key=lambda slot: -lengths[slot])
    assert chosen_by(UNIFORM, words_of(seed), CAPACITY, lengths) == by_length
