"""Real processes, killed at random instants: the ledger counts every update they made."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ledgers import ledger_of, without_epsilon
from support import (
    OPTIONS,
    PRIVATE,
    python,
)

import pevdn
from pevdn.config import experiment as config
from pevdn.privacy.ledger import Ledger
from pevdn.training import loop as runs
from pevdn.training.loop import Run

pytestmark = pytest.mark.usefixtures("compiled_once")

# Imports once and forks a training for every line it reads, before JAX has started. The first
# compiles; the others load its programs. Prints each process number, then its exit code.
NURSERY = """
import json, os, pickle, sys, traceback, warnings
import numpy as np
import jax, optax, orbax.checkpoint, jax_privacy.clipping, dp_accounting.pld
from jax.experimental import serialize_executable as executables
from pevdn.training import checkpoint, loop as run
from pevdn.privacy import ledger, planner
from pevdn.simulation import program as simulation
from pevdn.worlds import toy

warnings.simplefilter("ignore")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
programs, compile_now = sys.argv[1], run._Training._compile


def compiled(self):
    if not os.path.exists(programs):
        compile_now(self)
        win_rate = jax.ShapeDtypeStruct(self.seeds.shape, "float32")
        keep_anchor = self.evaluate._keep_anchor.lower(self.state, win_rate).compile()
        parts = [self.advance, self.evaluate._evaluate, keep_anchor]
        parts = [executables.serialize(part) for part in parts]
        with open(programs + ".new", "wb") as file:
            pickle.dump(parts, file)
        os.rename(programs + ".new", programs)
    with open(programs, "rb") as file:
        parts = pickle.load(file)
    parts = [executables.deserialize_and_load(*part) for part in parts]
    self.evaluate = run.Evaluator(self.simulation, self.seeds, self.lanes.jit)
    advance, self.evaluate._evaluate, self.evaluate._keep_anchor = parts
    self.compile_seconds = 0.0

    def counting(state, *rest):
        before = np.array(state.updates)
        after = advance(state, *rest)
        made = (np.asarray(after.updates) - before).tolist()
        os.write(out, (json.dumps(made) + "\\n").encode())  # done, and not yet in the ledger
        return after

    self.advance = counting


run._Training._compile = compiled
for line in sys.stdin:
    path, applied = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            out = os.open(applied, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            # Programs that come from the cache cannot be saved again.
            jax.config.update("jax_enable_compilation_cache", os.path.exists(programs))
            run.resume(path)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def applied_in(path: Path) -> list[int]:
    """Updates made by all processes together, by seed."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [sum(column) for column in zip(*map(json.loads, lines), strict=True)] or [0, 0]


def lives(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


def kill_again_and_again(folder: Path, kills: int, seed: int, luck: int) -> list[Run]:
    """Train with `kills` SIGKILLs at random instants, in as many runs as that takes."""
    chance, killed, begun, programs = random.Random(luck), 0, [], folder / "programs"

    def said() -> str:
        return (folder / "stderr").read_text()

    # XLA's warnings would fill an unread pipe and block the nursery.
    with (
        (folder / "stderr").open("w+") as errors,
        python(NURSERY, programs, stdin=subprocess.PIPE, stderr=errors) as nursery,
    ):
        while killed < kills:
            run, applied = Run(folder / f"run-{len(begun)}"), folder / f"applied-{len(begun)}"
            settings = {**PRIVATE, "eval_every": 100}
            wanted = config.make("pe-vdn-c", "toy:coordination", 1000, 2, seed, settings)
            run.path.mkdir()
            (run.path / "config.yaml").write_text(config.to_text(wanted, OPTIONS))
            applied.touch()
            begun.append(run)
            while killed < kills and not run.finished:
                before = applied.stat().st_size
                nursery.stdin.write(json.dumps([str(run.path), str(applied)]) + "\n")
                nursery.stdin.flush()
                child = int(nursery.stdout.readline())
                # Usually at any time after training started; one in ten at any time.
                training = not programs.exists() or chance.random() < 0.9
                while training and applied.stat().st_size == before and lives(child):
                    time.sleep(1e-3)
                time.sleep(chance.uniform(0, 1.5))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                code = int(nursery.stdout.readline())
                assert code in (-signal.SIGKILL, 0), (nursery.kill(), said())
                killed += code != 0
                if Ledger.begun(run.path):
                    counted = ledger_of(run).counted  # readable, whenever it was
                    pairs = zip(counted, applied_in(applied), strict=True)
                    assert all(n >= made for n, made in pairs)
        nursery.stdin.close()
        nursery.wait()
        assert "Traceback" not in said()
    return begun


def test_a_killed_run_counts_at_least_what_it_did_and_ends_as_if_it_never_had_been(
    tmp_path: Path,
) -> None:
    run, *_ = kill_again_and_again(tmp_path, kills=12, seed=1, luck=1)
    pevdn.resume(run.path)
    reference = runs.begin(run.config, tmp_path / "reference", options=OPTIONS)
    assert without_epsilon(run) == without_epsilon(reference)
    pairs = list(zip(run.metrics, reference.metrics, strict=True))
    assert all(a["epsilon_team"] >= b["epsilon_team"] for a, b in pairs)


@pytest.mark.slow
def test_a_thousand_kills_never_hide_an_update(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    workers = os.cpu_count() or 1
    folders = [tmp_path / str(n) for n in range(workers)]
    for folder in folders:
        folder.mkdir()
    kills = [-(-1000 // workers)] * workers
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(kill_again_and_again, folders, kills, [7] * workers, range(workers))
        ended = [without_epsilon(run) for begun in found for run in begun if run.finished]
    # The same training again and again, killed at other instants.
    assert len(ended) > 5
    assert all(metrics == ended[0] for metrics in ended)
