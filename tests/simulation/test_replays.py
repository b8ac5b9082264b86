"""Episodes in host memory: kept exactly, small, apart, and learnt from as on the device."""

from __future__ import annotations

import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
