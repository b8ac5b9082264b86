"""Small trainings, the command line with and without a process of its own, and what a run left."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pevdn
from pevdn import _platform, worlds
from pevdn.cli import main
from pevdn.config.runtime import RuntimeOptions, option_fields
from pevdn.simulation.program import Simulation
from pevdn.training.checkpoint import Checkpoints, Progress
from pevdn.training.directory import Run

# One program for each algorithm: what differs below these settings is not compiled in.
SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "buffer_size": 32,
    "expected_batch_size": 4,
    "parallel_episodes": 2,
    "learning_rate": 0.005,
    "learning_starts": 8,
    "eval_episodes": 8,
    "eval_every": 40,
}
PRIVATE: dict[str, Any] = {
    **SMALL,
    "anchor": True,
    "anchor_threshold": 0.0,
    "update_every": 1,
    "noise_multiplier": 1.0,
    "delta": 0.02,  # so that a few updates cost little enough for the budgets of these tests
    "network": "recurrent",  # the coordination game takes memory
    "average_decay": 0.0,
}
OPTIONS = RuntimeOptions(checkpoint_every=100)
# Long enough to be killed in the middle, with many lines from one checkpoint to the next.
LONG: dict[str, Any] = {"steps": 1600, "eval_every": 40, "checkpoint_every": 600}
# What production compiles with: conftest.py has set other flags, for speed.
PRODUCTION: dict[str, Any] = {_platform.LEVEL: 1, "xla_cpu_parallel_codegen_split_count": 32}
if "fusion_emitters" in os.environ["XLA_FLAGS"]:
    PRODUCTION["xla_cpu_use_fusion_emitters"] = True
WORLD = {
    "pe-vdn-b": "toy:two-step",
    "pe-vdn-c": "toy:coordination",
    "pe-vdn-d": "toy:coordination",
}


def slow(*values: Any) -> Any:
    """A case of a test that `make test-slow` runs; the others stand for it elsewhere."""
    return pytest.param(*values, marks=pytest.mark.slow)


def small(algorithm: str) -> dict[str, Any]:
    return SMALL if algorithm == "pe-vdn-b" else PRIVATE


def train(algorithm: str, out: Path, steps: int = 200, **changes: Any) -> Run:
    settings = {"checkpoint_every": OPTIONS.checkpoint_every, **small(algorithm), **changes}
    return pevdn.train(algorithm, WORLD[algorithm], steps=steps, out=out, **settings)


def train_arguments(algorithm: str, out: Path, steps: int = 200, **changes: Any) -> list[str]:
    """The same training, as one types it."""
    settings = {"checkpoint_every": OPTIONS.checkpoint_every, **small(algorithm), **changes}
    flags = ("seed", "seeds", *option_fields())
    own = [f"--{n.replace('_', '-')}={settings.pop(n)}" for n in flags if n in settings]
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    world = WORLD[algorithm]
    return ["train", algorithm, f"--env={world}", f"--steps={steps}", f"--out={out}", *own, *sets]


# --- the command line ------------------------------------------------------------------------


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line in which a command gave up."""
        lines = [line for line in self.err.splitlines() if line.startswith("pevdn: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(lines[0] + "\n"), self.err
        assert "Traceback" not in self.err, self.err
        return lines[0]


def cli(*arguments: object) -> Said:
    """`pevdn …` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in arguments])
            code: Any = 0
        except SystemExit as left:
            code = left.code or 0
    return Said(code, out.getvalue(), err.getvalue())


def start(*arguments: object, **how: Any) -> subprocess.Popen[str]:
    """`pevdn …` in a process of its own, installed or not."""
    return python("from pevdn.cli import main; main()", *arguments, **how)


def import_path(*first: Path) -> str:
    """PYTHONPATH of a child process: these folders, the shared harness, what is set already."""
    folders = [*map(str, first), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, folders))


def python(program: str, *arguments: object, **how: Any) -> subprocess.Popen[str]:
    path = import_path(Path(pevdn.__file__).parents[1])
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
    how["env"] = {**os.environ, "PYTHONPATH": path, **how.get("env", {})}
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], **how)


def finish(process: subprocess.Popen[str], timeout: float = 120) -> Said:
    """What it said, once it has ended."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Said(process.returncode, out, err or "")


def wait_until(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, f"ended too early:\n{finish(process)}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def strict(text: str) -> Any:
    """Parse JSON, and refuse what only Python's parser accepts."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


class Failing:
    """Stands in for a call; fails from the n-th time on (disk full), until `freed` is set."""

    def __init__(self, real: Callable[..., Any], n: int, failure: Exception | None = None) -> None:
        self._real, self._left, self.freed = real, n, False
        self._failure = failure or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left < 0 and not self.freed:
            raise self._failure
        return self._real(*args, **kwargs)


# --- what a run left -------------------------------------------------------------------------


def metrics_of(run: Path) -> bytes:
    return (run / "metrics.jsonl").read_bytes()


def lines_in(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def checkpoints_in(run: Path) -> list[int]:
    folder = run / "checkpoints"
    return sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit())


def lines_saved(run: Path) -> int:
    """How many lines the newest checkpoint knows of; 0 without a checkpoint."""
    numbers = checkpoints_in(run)
    if not numbers:
        return 0
    document = run / "checkpoints" / str(numbers[-1]) / "progress" / "metadata"
    return int(json.loads(document.read_text())["metrics_lines"])


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def saved(run: Run) -> tuple[list[np.ndarray], Progress]:
    """All arrays of the newest checkpoint, and where the host stood."""
    simulation = Simulation(worlds.make(run.config.env), run.config, run.options)
    checkpoints = Checkpoints(run.path, run.config, read_only=True)
    state, progress = checkpoints.restore(simulation)
    checkpoints.close()

    def plain(leaf: Any) -> np.ndarray:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [plain(leaf) for leaf in jax.tree.leaves(state)], progress


def refused_resume(path: Path, code: int) -> str:
    """Return the sentence of a refused `pevdn resume`, which must change nothing."""
    before = content(path)
    said = cli("resume", path)
    assert said.code == code and said.out == ""
    assert content(path) == before
    return said.sentence


def assert_same_ending(run: Run, reference: Run) -> None:
    """Two runs ended in the same place, to the last bit."""
    assert metrics_of(run.path) == metrics_of(reference.path)
    arrays, progress = saved(run)
    wanted, wanted_progress = saved(reference)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, wanted, strict=True))
    assert progress.evaluations == wanted_progress.evaluations
    assert progress.metrics_lines == wanted_progress.metrics_lines
    assert {**run.summary, **TIMES} == {**reference.summary, **TIMES}


TIMES = dict.fromkeys(
    [
        "env_steps_per_second",
        "training_seconds",
        "compile_seconds",
        "wall_seconds",
        "peak_memory_bytes",
    ]
)


def split_keys(keys: jax.Array, count: int) -> jax.Array:
    """Keys (S,) to (S, count)."""
    return jax.vmap(lambda key: jax.random.split(key, count))(keys)
