"""Episodes in host memory: kept exactly, small, apart, and learnt from as on the device."""

from __future__ import annotations

import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import (
    assert_same_ending,
    cli,
    finish,
    lines_in,
    lines_saved,
    metrics_of,
    slow,
    start,
    train,
    train_arguments,
    wait_until,
)

import pevdn
from pevdn import worlds
from pevdn.agent.packed_replay import PackedReplay
from pevdn.agent.replay import Episode
from pevdn.config import experiment as config
from pevdn.config.runtime import RuntimeOptions
from pevdn.errors import PevdnError
from pevdn.simulation.devices import Lanes
from pevdn.simulation.program import Simulation
from pevdn.training import memory
from pevdn.training.checkpoint import Checkpoints
from pevdn.training.loop import Run
from pevdn.worlds.base import AgentSpec, Step

ON_HOST = RuntimeOptions(buffer="host")
# Zeros of both signs, NaNs with a payload, infinities, the smallest numbers, and any other bits.
BITS = st.sampled_from([0, 0, 1 << 31, 0x7FC00001, 0xFF800001, 0x7F800000, 1]) | st.integers(
    0, 2**32 - 1
)


@st.composite
def episodes(draw: st.DrawFn, T: int, O: int, A: int) -> Episode:
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
    )


def blank(T: int, B: int, O: int, A: int) -> Episode:
    return Episode(
        np.zeros((T + 1, B, O), np.float32),
        np.zeros((T + 1, B, A), bool),
        np.zeros((T, B), np.int16),
        np.zeros((T, B), np.float32),
        np.zeros((T, B), bool),
        np.zeros(B, np.int32),
    )


def assert_same_bits(found: Episode, wanted: Episode) -> None:
    for name, a, b in zip(Episode._fields, found, wanted, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), name


@given(st.data())
def test_what_is_fetched_is_what_was_stored_to_the_last_bit(data: st.DataObject) -> None:
    T, O, A = (data.draw(st.integers(1, n)) for n in (6, 11, 9))
    stored = data.draw(st.lists(episodes(T, O, A), min_size=1, max_size=4))
    replay = PackedReplay(len(stored))
    for slot, episode in enumerate(stored):
        replay.store(slot, episode)
    scratch = len(stored)
    slots = data.draw(st.lists(st.integers(0, scratch), min_size=1, max_size=5))
    longest = max(int(replay.length[slot]) for slot in slots)
    steps = data.draw(st.integers(longest, T))
    batch = blank(steps, len(slots), O, A)
    replay.fetch(np.array(slots), batch)
    for b, slot in enumerate(slots):
        found = Episode(*(x[:, b] for x in batch[:-1]), batch.length[b])
        if slot == scratch:
            assert not any(np.any(x) for x in found)
            continue
        whole = stored[slot]
        cut = [x[: steps + 1] for x in whole[:2]] + [x[:steps] for x in whole[2:-1]]
        assert_same_bits(found, Episode(*cut, whole.length))


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
        assert_same_bits(Episode(*(x[:, b] for x in batch[:-1]), batch.length[b]), episode)


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
    constant = Episode(*(x[:, 0] for x in episode[:-1]), np.int32(T))
    constant.observations[:] = np.arange(O)
    replay = PackedReplay(1)
    replay.store(0, constant)
    masks = (T + 1) * (O + 8) / 8 + T / 8
    assert replay.nbytes == masks + T * (2 + 4) + 4 * (O - 1)


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"), [("pe-vdn-b", {}), slow("pe-vdn-c", {}), ("pe-vdn-c", {"seeds": 2})]
)
def test_a_run_is_the_same_wherever_its_episodes_are_kept(tmp_path, name, changes) -> None:
    there = train(name, tmp_path / "device", **changes)
    here = train(name, tmp_path / "host", buffer="host", **changes)
    assert here.metrics[-1]["updates"] > 20
    assert metrics_of(here.path) == metrics_of(there.path)


class Walk:
    """Two unlike agents; an episode ends by chance or after 24 steps: long enough for horizons."""

    name, max_steps = "walk", 24
    agents = (AgentSpec(5, 2), AgentSpec(7, 3), AgentSpec(5, 2))

    def reset(self, key):
        position = jax.random.normal(key, (3,))
        return (position, jnp.int32(0)), self._seen(position, jnp.int32(0), 0.0, False)

    def step(self, key, state, actions):
        position = state[0] + jnp.stack(actions) - 0.5 + 0.1 * jax.random.normal(key, (3,))
        t, over = state[1] + 1, jax.random.uniform(key) < 0.08
        return (position, t), self._seen(position, t, -jnp.abs(position).sum(), over)

    def _seen(self, position, t, reward, over):
        return Step(
            observations=tuple(
                x * (jnp.arange(a.observation_size) % 3 == t % 3)
                for x, a in zip(position, self.agents, strict=True)
            ),
            available=tuple(jnp.ones(a.n_actions, bool) for a in self.agents),
            reward=jnp.float32(reward),
            done=over | (t >= self.max_steps),
            truncated=(t >= self.max_steps) & ~jnp.asarray(over),
            won=jnp.asarray(over),
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pe-vdn-b", "pe-vdn-c"])
def test_parts_and_horizons_are_those_of_the_compiled_program(name: str) -> None:
    settings = {
        "hidden_size": 8,
        "buffer_size": 40,
        "expected_batch_size": 12,
        "parallel_episodes": 4,
        "learning_starts": 16,
        "update_every": 1,
        "buffer_throughput": 1.5,
    }
    wanted = config.make(name, seeds=2, settings=settings)
    seeds, arguments = jnp.arange(2), (jnp.int32(900), jnp.int32(30), jnp.full(2, 60, jnp.int32))
    device, host = Simulation(Walk(), wanted), Simulation(Walk(), wanted, ON_HOST)
    jit = Lanes(1, 2, print).jit
    there = device.compile(jit)(jax.jit(device.start)(seeds), *arguments)
    here = host.compile(jit)(jax.jit(host.start)(seeds), *arguments)
    assert np.all(there.updates > 20) and np.all(there.episodes > 40)
    for field in ("env_steps", "episodes", "updates", "stored_at", "exposure", "exhausted"):
        assert np.array_equal(getattr(here, field), getattr(there, field)), field
    assert np.array_equal(jax.random.key_data(here.key), jax.random.key_data(there.key))
    learnt = [jax.tree.leaves([x.params for x in state.learners]) for state in (here, there)]
    for ours, theirs in zip(*learnt, strict=True):  # compiled apart, the last bit may differ
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def rows(run: Run) -> dict[tuple[int, int, int], list[bytes]]:
    """The episodes in the newest checkpoint."""
    simulation = Simulation(worlds.make(run.config.env), run.config, ON_HOST)
    checkpoints = Checkpoints(run.path, run.config, read_only=True)
    checkpoints.restore(simulation)
    checkpoints.close()
    return {name: replay.rows for name, replay in simulation.replay.rows.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pe-vdn-b", "pe-vdn-c"])
def test_a_killed_run_ends_as_if_it_never_had_been(tmp_path: Path, name: str) -> None:
    long = {"steps": 600, "checkpoint_every": 200}
    reference = train(name, tmp_path / "whole", buffer="host", **long)
    path = tmp_path / "killed"
    process = start(*train_arguments(name, path, **long), "--buffer", "host")
    wait_until(process, lambda: lines_in(path) >= lines_saved(path) + 2 > 2)
    process.kill()
    assert finish(process).code == -signal.SIGKILL
    assert lines_in(path) > lines_saved(path) > 0 and not Run(path).finished

    assert cli("resume", path).code == 0
    assert rows(Run(path)) == rows(reference)
    if name == "pe-vdn-b":
        assert_same_ending(Run(path), reference)
    for line, wanted in zip(Run(path).metrics, reference.metrics, strict=True):
        assert line == {k: v if "epsilon" not in k else line[k] for k, v in wanted.items()}
        assert all(line[k] >= wanted[k] for k in wanted if "epsilon" in k)


def test_a_buffer_that_outgrows_the_machine_stops_training_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(memory, "machine_memory", lambda: 1000)
        with pytest.raises(PevdnError, match=r"of buffer_size=32 episodes.*everything is saved"):
            train("pe-vdn-b", path, buffer="host")
    reference = train("pe-vdn-b", tmp_path / "whole", buffer="host")
    assert_same_ending(pevdn.resume(path), reference)
