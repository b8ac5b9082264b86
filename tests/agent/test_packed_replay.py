"""Packed episodes: kept to the last bit, small, and the same after a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pevdn.agent.packed_replay import PackedReplay
from pevdn.agent.replay import Episode

# Zeros of both signs, NaNs with a payload, infinities, the smallest numbers, and any other bits.
BITS = st.sampled_from([0, 0, 1 << 31, 0x7FC00001, 0xFF800001, 0x7F800000, 1]) | st.integers(
    0, 2**32 - 1
)


@st.composite
def episodes(draw: st.DrawFn, T: int, O: int, A: int, opened: bool = False) -> Episode:
    """Any episode as the tape leaves it: zeros after its last step."""
    n = draw(st.integers(0, T))

    def steps(dtype: type, rows: int, *shape: int, of: st.SearchStrategy | None = None):
        array = np.zeros((T + rows - n, *shape), dtype)
        array[:rows] = draw(hnp.arrays(dtype, (rows, *shape), elements=of))
        return array

    return Episode(
        observations=steps(np.uint32, n + 1, O, of=BITS).view(np.float32),
        available=steps(bool, n + 1, A),
        actions=steps(np.int16, n),
        rewards=steps(np.uint32, n, of=BITS).view(np.float32),
        terminal=steps(bool, n),
        length=np.int32(n),
        opened=steps(np.uint32, n, of=BITS).view(np.float32) if opened else None,
    )


def blank(T: int, B: int, O: int, A: int, opened: bool = False) -> Episode:
    return Episode(
        np.zeros((T + 1, B, O), np.float32),
        np.zeros((T + 1, B, A), bool),
        np.zeros((T, B), np.int16),
        np.zeros((T, B), np.float32),
        np.zeros((T, B), bool),
        np.zeros(B, np.int32),
        np.zeros((T, B), np.float32) if opened else None,
    )


def one_of(batch: Episode, b: int) -> Episode:
    """Return the b-th episode (T, ...) of a batch."""
    return batch.map(lambda x: x[:, b] if x.ndim > 1 else x[b])


def assert_same_bits(found: Episode, wanted: Episode) -> None:
    for name, a, b in zip(Episode._fields, found, wanted, strict=True):
        assert (a is None) == (b is None)
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), name


@given(st.data())
def test_what_is_fetched_is_what_was_stored_to_the_last_bit(data: st.DataObject) -> None:
    T, O, A = (data.draw(st.integers(1, n)) for n in (6, 11, 9))
    opened = data.draw(st.booleans())
    stored = data.draw(st.lists(episodes(T, O, A, opened), min_size=1, max_size=4))
    replay = PackedReplay(len(stored))
    for slot, episode in enumerate(stored):
        replay.store(slot, episode)
    scratch = len(stored)
    slots = data.draw(st.lists(st.integers(0, scratch), min_size=1, max_size=5))
    longest = max(int(replay.length[slot]) for slot in slots)
    steps = data.draw(st.integers(longest, T))
    batch = blank(steps, len(slots), O, A, opened)
    replay.fetch(np.array(slots), batch)
    for b, slot in enumerate(slots):
        found = one_of(batch, b)
        if slot == scratch:
            assert not any(np.any(x) for x in found if x is not None)
            continue
        whole = stored[slot]
        assert_same_bits(found, first_steps(whole, steps))
        if opened:
            n = int(whole.length)
            assert replay.opened(slot).tobytes() == whole.opened[:n].tobytes()


def first_steps(whole: Episode, steps: int) -> Episode:
    states = [x[: steps + 1] for x in whole[:2]]
    cut = Episode(*states, *(x[:steps] for x in whole[2:5]), whole.length)
    return cut if whole.opened is None else cut._replace(opened=whole.opened[:steps])


@given(episodes(4, 5, 3, True), hnp.arrays(np.float32, 4))
def test_opening_an_episode_replaces_what_was_opened_and_nothing_else(
    episode: Episode, opened: np.ndarray
) -> None:
    replay = PackedReplay(1)
    replay.store(0, episode)
    replay.open(0, opened)
    batch = blank(4, 1, 5, 3, True)
    replay.fetch(np.array([0]), batch)
    played = np.where(np.arange(4) < episode.length, opened, np.float32(0))
    assert_same_bits(one_of(batch, 0), episode._replace(opened=played))


@given(st.data())
def test_the_newest_episode_replaces_what_was_in_its_slot(data: st.DataObject) -> None:
    T, O, A = 4, 5, 3
    stream = data.draw(st.lists(episodes(T, O, A), min_size=1, max_size=9))
    replay = PackedReplay(3)
    for number, episode in enumerate(stream):
        replay.store(number % 3, episode)
    newest = stream[-3:]
    slots = np.array([(len(stream) - len(newest) + i) % 3 for i in range(len(newest))])
    batch = blank(T, len(newest), O, A)
    replay.fetch(slots, batch)
    for b, episode in enumerate(newest):
        assert_same_bits(one_of(batch, b), episode)


@given(st.lists(episodes(3, 4, 2), max_size=5))
def test_a_replay_comes_back_from_the_disk_as_it_was(
    tmp_path_factory, stored: list[Episode]
) -> None:
    path: Path = tmp_path_factory.mktemp("replay") / "replay"
    replay, other = PackedReplay(4), PackedReplay(4)
    for slot, episode in enumerate(stored[:4]):
        replay.store(slot, episode)
    replay.save(path)
    other.load(path)
    assert other.rows == replay.rows
    assert np.array_equal(other.length, replay.length)


def test_what_does_not_change_costs_one_bit() -> None:
    T, O = 40, 80
    episode = blank(T, 1, O, 8)
    constant = one_of(episode, 0)._replace(length=np.int32(T))
    constant.observations[:] = np.arange(O)
    replay = PackedReplay(1)
    replay.store(0, constant)
    masks = (T + 1) * (O + 8) / 8 + T / 8
    assert replay.nbytes == masks + T * (2 + 4) + 4 * (O - 1)
