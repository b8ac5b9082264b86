"""The worker pool: every way in which a worker fails, and processes that leave nothing behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_worlds as tiny
from support import python

from pevdn.errors import UsageError
from pevdn.worlds.workers import IDLE, RESET, STEP, Fault, WorkerPool

FAULTS = {
    tiny.raises: "raised ValueError: the dice are lost",
    tiny.hangs: "did not answer within world_timeout=0.5 seconds",
    tiny.dies: "ended its process (SIGKILL)",
    tiny.leaves: "ended its process (exit code 3)",
    tiny.pays_nan: "returned reward nan",
    tiny.sees_infinity: "gave agent 1 an observation whose entry 1 is inf",
    tiny.grows: "gave agent 0 an observation of shape (4,), not of shape (3,)",
    tiny.offers_nothing: "gave agent 0 no available action",
}


@pytest.mark.parametrize("how", FAULTS)
def test_the_fault_of_a_worker_is_reported(how: Callable[..., Any]) -> None:
    pool = WorkerPool(tiny.failing(how), 3, 0.5 if how is tiny.hangs else 60.0)
    try:
        if how is tiny.hangs:  # starting a process takes longer
            pool.timeout = 60.0
        pool.rows["order"] = RESET
        pool.turn()
        assert (pool.rows["order"] == IDLE).all()
        pool.rows["order"] = STEP
        pool.turn()
        pool.timeout = 0.5 if how is tiny.hangs else 60.0
        pool.rows["order"][2] = STEP
        with pytest.raises(Fault) as fault:
            pool.turn()
        assert (fault.value.worker, fault.value.what) == (2, FAULTS[how])
    finally:
        processes = [process.process for process in pool._processes]
        pool.close()
    assert processes
    assert not any(process.is_alive() for process in processes)


def test_an_environment_in_this_process_that_hangs_is_interrupted() -> None:
    pool = WorkerPool(tiny.failing(tiny.hangs, 1, max_workers=1), 1, 0.2)
    pool.rows["order"] = RESET
    pool.turn()
    pool.rows["order"] = STEP
    with pytest.raises(Fault, match=r"did not answer within world_timeout=0\.2 s"):
        pool.turn()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    pool.close()


def test_a_world_that_cannot_be_pickled_is_refused() -> None:
    world = dataclasses.replace(tiny.TWO_STEP, build=lambda: tiny.TwoStep())
    with pytest.raises(
        UsageError, match="world 'tiny:two-step' cannot be pickled for worker processes"
    ):
        WorkerPool(world, 2, 1.0)


ORPHANS = """
import sys
import tiny_worlds as tiny
from pevdn.worlds.workers import *
world = tiny.failing(tiny.hangs, 1)
pool = WorkerPool(world, 2, 60.0)
pool.rows["order"] = RESET
pool.turn()
assert "jax" not in sys.modules
print(*(process.process.pid for process in pool._processes), flush=True)
pool.rows["order"] = [STEP, IDLE]
pool.turn()
"""


def test_workers_die_with_a_parent_that_was_killed_even_if_their_world_hangs() -> None:
    parent = python(ORPHANS)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    for pid in pids:
        assert os.getpgid(pid) != os.getpgid(parent.pid)  # Ctrl-C is for a whole group
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    assert all(map(alive, pids))
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < until, "still there"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
