"""A worker pool: environments of an external world, stepped in parallel processes.

A worker runs one environment. Workers share processes, at most one process per core. Each worker
has one row of shared memory for its order and its result; the parent also counts turns in shared
memory. A message through a pipe ends a process's turn, and wakes it if it sleeps. Processes import
this module and the code that builds the world, but not JAX.

Shapes: K workers, N agents, O and A the sizes of all agents' observations and actions together.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np

from pevdn.errors import UsageError
from pevdn.storage.signals import STOP
from pevdn.worlds.base import AgentSpec, ExternalEnv, ExternalWorld
from pevdn.worlds.external import problem_of

IDLE, RESET, STEP = range(3)  # orders
GRACE = 5.0  # seconds that a world has to close
AWAKE = 2e-3  # seconds that a process polls for its next turn before it sleeps
STATUS = np.dtype(  # of one process
    [
        ("worker", np.int64),  # the one that is busy, counted within the process
        ("since", np.float64),  # when it became busy (monotonic clock)
        ("turns", np.int64),  # turns begun
        ("asleep", bool),
    ]
)


class Fault(Exception):
    """A failed worker, and what it did, such as "raised ValueError: no"."""

    def __init__(self, worker: int, what: str) -> None:
        super().__init__(worker, what)
        self.worker, self.what = worker, what


class _Timeout(BaseException):
    """The environment took too long; a `BaseException`, so that no world catches it."""


def row_type(agents: Sequence[AgentSpec]) -> np.dtype:
    """Return the type of a worker's row: its order, then a step with all agents' arrays joined."""
    return np.dtype(
        [
            ("order", np.int8),  # IDLE, RESET or STEP
            ("seed", np.int32),
            ("actions", np.int32, (len(agents),)),
            ("observations", np.float32, (sum(spec.observation_size for spec in agents),)),
            ("available", bool, (sum(spec.n_actions for spec in agents),)),
            ("reward", np.float32),
            ("done", bool),
            ("truncated", bool),
            ("won", bool),
        ],
        align=True,
    )


class WorkerPool:
    """K workers: write orders into `rows` (K,), then `turn` carries them out.

    A worker builds its environment at its first order. A world with `max_workers=1` runs in this
    process, because it may be an object that cannot be pickled.
    """

    def __init__(self, world: ExternalWorld, count: int, timeout: float) -> None:
        local, kind = world.max_workers == 1, row_type(world.agents)
        size = 0 if local else min(count, os.cpu_count() or 1)
        context = multiprocessing.get_context("spawn")  # a fork would inherit JAX's locks
        memory = context.RawArray("b", count * kind.itemsize)
        status = context.RawArray("b", max(size, 1) * STATUS.itemsize)
        self.rows, self.timeout = np.frombuffer(memory, kind), timeout
        self._local = _Environments(world.build, world.agents, self.rows) if local else None
        self._processes: list[_Process] = []
        atexit.register(self.close)  # before multiprocessing waits for its processes
        with _as_main_for(world), _signals_blocked():
            for first in range(size):
                pipe, other_end = context.Pipe()
                arguments = (world.build, world.agents, memory, status, first, size, other_end)
                process = context.Process(target=_run, args=arguments)
                process.start()
                other_end.close()
                own = np.frombuffer(status, STATUS)[first : first + 1]
                rows = self.rows[first::size]
                self._processes.append(_Process(process, pipe, rows, own, first, size))

    def turn(self) -> None:
        """Carry out all orders and reset them to `IDLE`; raise the first `Fault`."""
        if self._local is not None:
            with _alarm(self.timeout):
                fault = self._local.turn()
            if fault is not None:
                raise Fault(*fault)
        started = [process for process in self._processes if process.start_turn()]
        for process in started:
            process.end_turn(self.timeout)
        self.rows["order"] = IDLE

    def close(self) -> None:
        """Close all environments; kill processes that do not end, and their child processes."""
        atexit.unregister(self.close)
        if self._local is not None:
            self._local.close()
        for process in self._processes:
            process.pipe.close()
        for process in self._processes:
            process.process.join(GRACE)
            process.kill()
        self._local, self._processes = None, []


class _Environments:
    """The environments of one process, built when needed, and their rows."""

    def __init__(
        self, build: Callable[[], ExternalEnv], agents: Sequence[AgentSpec], rows: np.ndarray
    ) -> None:
        self.build, self.agents, self.rows = build, agents, rows
        self.envs: dict[int, ExternalEnv] = {}

    def turn(self, on_start: Callable[[int], None] = lambda i: None) -> tuple[int, str] | None:
        """Carry out all orders up to the first fault; return its worker and what it did."""
        for i in np.flatnonzero(self.rows["order"]).tolist():
            on_start(i)
            fault = self._carry_out(i, self.rows[i])
            if fault is not None:
                return i, fault
        return None

    def _carry_out(self, i: int, row: Any) -> str | None:
        try:
            if row["order"] == STEP:
                step = self.envs[i].step(tuple(row["actions"].tolist()))
            else:
                if i not in self.envs:
                    self.envs[i] = self.build()
                step = self.envs[i].reset(int(row["seed"]))
        except (Exception, _Timeout) as problem:
            if isinstance(problem, _Timeout):
                return str(problem)
            text = " ".join(str(problem).split())
            return f"raised {type(problem).__name__}" + (f": {text}" if text else "")
        fault = problem_of(step, self.agents)
        if fault is None:
            np.concatenate(step.observations, out=row["observations"], casting="unsafe")
            np.concatenate(step.available, out=row["available"], casting="unsafe")
            row["reward"] = step.reward
            row["done"], row["truncated"], row["won"] = step.done, step.truncated, step.won
        return fault

    def close(self) -> None:
        for env in self.envs.values():
            with suppress(Exception):
                env.close()


# ---- the parent's side of a process -------------------------------------------------------------


class _Process:
    """A process with every `size`-th worker, starting at worker `first`."""

    def __init__(
        self,
        process: Any,
        pipe: Connection,
        rows: np.ndarray,
        status: np.ndarray,
        first: int,
        size: int,
    ) -> None:
        self.process, self.pipe, self.rows, self.status = process, pipe, rows, status
        self.first, self.size = first, size

    def start_turn(self) -> bool:
        """Start the turn; return False if no worker has an order."""
        ordered = np.flatnonzero(self.rows["order"])
        if not len(ordered):
            return False
        self.status["worker"], self.status["since"] = ordered[0], time.monotonic()
        self.status["turns"] += 1
        if self.status["asleep"][0]:
            with suppress(OSError):  # the process has died: `end_turn` reports it
                self.pipe.send_bytes(b"turn")
        return True

    def end_turn(self, timeout: float) -> None:
        """Wait until the process reports the end of the turn."""
        try:
            while not self.pipe.poll(self.status["since"][0] + timeout - time.monotonic()):
                if time.monotonic() - self.status["since"][0] > timeout:
                    self.kill()
                    raise self._fault(_timed_out(timeout))
            report = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.process.join(GRACE)
            raise self._fault(f"ended its process ({_reason(self.process.exitcode)})") from None
        if report:
            i, what = pickle.loads(report)
            raise self._fault(what, i)

    def _fault(self, what: str, i: int | None = None) -> Fault:
        i = int(self.status["worker"][0]) if i is None else i
        return Fault(self.first + i * self.size, what)

    def kill(self) -> None:
        """Kill the process and the child processes of its environments."""
        if self.process.is_alive():
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # if it has no process group of its own yet
        self.process.join()


def _timed_out(timeout: float) -> str:
    return f"did not answer within world_timeout={timeout:g} seconds"


def _reason(code: int | None) -> str:
    return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals in processes started here until they have set their handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _as_main_for(world: ExternalWorld) -> Iterator[None]:
    """Hide the parent's script from the processes, unless the world is built by code in it.

    Spawned processes import the script again, which fails if it trains at import.
    """
    try:
        needed = world.max_workers == 1 or b"__main__" in pickle.dumps(world.build)
    except Exception as problem:
        raise UsageError(
            f"world '{world.name}' cannot be pickled for worker processes ({problem}); build it "
            "with a module-level function, or set max_workers=1."
        ) from None
    main = sys.modules["__main__"]
    try:
        if not needed:
            sys.modules["__main__"] = ModuleType("__main__")
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Interrupt an environment in this process after `seconds`; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise _Timeout(_timed_out(seconds))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- inside a process ---------------------------------------------------------------------------


def _run(
    build: Callable[[], ExternalEnv],
    agents: Sequence[AgentSpec],
    memory: Any,
    status: Any,
    first: int,
    size: int,
    pipe: Connection,
) -> None:
    """Carry out one turn after the other until the pipe is closed."""
    os.setsid()  # Ctrl-C reaches neither this process nor its children
    for number in STOP:  # for the parent alone, which then closes the pool
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, children do not inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
    os.dup2(2, 1)  # keep the parent's stdout free of a world's output
    threading.Thread(target=_die_with_parent, daemon=True).start()
    environments = _Environments(
        build, agents, np.frombuffer(memory, row_type(agents))[first::size]
    )
    own = np.frombuffer(status, STATUS)[first : first + 1]

    def on_start(i: int) -> None:
        own["worker"], own["since"] = i, time.monotonic()

    try:
        with suppress(EOFError, OSError):
            for turn in itertools.count(1):
                _await_turn(turn, own, pipe)
                fault = environments.turn(on_start)
                pipe.send_bytes(pickle.dumps(fault) if fault else b"")
    finally:
        environments.close()


def _await_turn(turn: int, status: np.ndarray, pipe: Connection) -> None:
    """Wait until turn number `turn` begins: poll first, because waking a process is slow."""
    until = time.monotonic() + AWAKE
    while status["turns"][0] < turn:
        if time.monotonic() < until:
            os.sched_yield()
            continue
        status["asleep"] = True
        if status["turns"][0] < turn and pipe.poll(0.1):  # timeout: the wake-up may race with this
            pipe.recv_bytes()
    status["asleep"] = False


def _die_with_parent() -> None:
    """End this process when its parent was killed, even if an environment hangs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)
