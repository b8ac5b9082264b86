"""WorkerPool of a world outside of JAX, stepped side by side in processes of their own.

A worker process holds a few copies. What a copy is told and what it gives are one row of memory
that both processes see, and so is the number of turns begun; a word through a pipe ends a turn, and
wakes a worker up that sleeps. Workers import this module and whatever builds the world, and no JAX.

Shapes: K copies, N agents, O and A the sizes of all agents' observations and actions together.
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
from pevdn.worlds.base import AgentSpec, ExternalEnv, ExternalWorld
from pevdn.worlds.external import problem_of

IDLE, RESET, STEP = range(3)
GRACE = 5.0  # seconds that a world has to close
OURS = (signal.SIGINT, signal.SIGTERM)  # for the parent alone, which then closes its workers
AWAKE = 2e-3  # seconds that a worker looks out for its next turn before it sleeps
WATCH = np.dtype(
    [
        ("copy", np.int64),  # what a worker is busy with
        ("since", np.float64),
        ("turns", np.int64),  # that have begun
        ("asleep", bool),
    ]
)


class Fault(Exception):
    """What a copy did wrong, as in "raised ValueError: no"."""

    def __init__(self, copy: int, what: str) -> None:
        super().__init__(copy, what)
        self.copy, self.what = copy, what


class _Overdue(BaseException):
    """Time is up; no world is meant to catch it."""


def row_type(agents: Sequence[AgentSpec]) -> np.dtype:
    """What a copy is told, and what it gives: a step with the arrays of all agents in one."""
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
    """K copies of a world: fill in `rows` (K,), and in a `turn` each copy does what its row says.

    A copy is built when it is first told something. A world of which there is one copy at most is
    played in this process, since it may be an object that cannot leave it.
    """

    def __init__(self, world: ExternalWorld, count: int, timeout: float) -> None:
        here, kind = world.copies == 1, row_type(world.agents)
        size = 0 if here else min(count, os.cpu_count() or 1)
        context = multiprocessing.get_context("spawn")  # a fork would inherit JAX's locks
        memory = context.RawArray("b", count * kind.itemsize)
        watch = context.RawArray("b", max(size, 1) * WATCH.itemsize)
        self.rows, self.timeout = np.frombuffer(memory, kind), timeout
        self._here = _Group(world.build, world.agents, self.rows) if here else None
        self._workers: list[_Worker] = []
        atexit.register(self.close)  # before multiprocessing waits for its processes
        with _as_main_for(world), _blocked():
            for w in range(size):
                ours, theirs = context.Pipe()
                given = (world.build, world.agents, memory, watch, w, size, theirs)
                process = context.Process(target=_work, args=given)
                process.start()
                theirs.close()
                mine = np.frombuffer(watch, WATCH)[w : w + 1]
                self._workers.append(_Worker(process, ours, self.rows[w::size], mine, w, size))

    def turn(self) -> None:
        """Every copy obeys its order, and all are idle again; raises the first `Fault`."""
        if self._here is not None:
            with _alarm(self.timeout):
                fault = self._here.turn()
            if fault is not None:
                raise Fault(*fault)
        asked = [worker for worker in self._workers if worker.ask()]
        for worker in asked:
            worker.hear(self.timeout)
        self.rows["order"] = IDLE

    def close(self) -> None:
        """Close all copies; a worker that does not end is killed, with all that it started."""
        atexit.unregister(self.close)
        if self._here is not None:
            self._here.close()
        for worker in self._workers:
            worker.words.close()
        for worker in self._workers:
            worker.process.join(GRACE)
            worker.kill()
        self._here, self._workers = None, []


class _Group:
    """WorkerPool in one process, and their rows."""

    def __init__(
        self, build: Callable[[], ExternalEnv], agents: Sequence[AgentSpec], rows: np.ndarray
    ) -> None:
        self.build, self.agents, self.rows = build, agents, rows
        self.envs: dict[int, ExternalEnv] = {}

    def turn(self, note: Callable[[int], None] = lambda i: None) -> tuple[int, str] | None:
        """Obey all orders, or up to the first fault: whose it is, and what."""
        for i in np.flatnonzero(self.rows["order"]).tolist():
            note(i)
            fault = self._obey(i, self.rows[i])
            if fault is not None:
                return i, fault
        return None

    def _obey(self, i: int, row: Any) -> str | None:
        try:
            if row["order"] == STEP:
                step = self.envs[i].step(tuple(row["actions"].tolist()))
            else:
                if i not in self.envs:
                    self.envs[i] = self.build()
                step = self.envs[i].reset(int(row["seed"]))
        except (Exception, _Overdue) as problem:
            if isinstance(problem, _Overdue):
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


# ---- the parent's side of a worker --------------------------------------------------------------


class _Worker:
    """A process with every `size`-th copy, from copy `first` on."""

    def __init__(
        self,
        process: Any,
        words: Connection,
        rows: np.ndarray,
        watch: np.ndarray,
        first: int,
        size: int,
    ) -> None:
        self.process, self.words, self.rows, self.watch = process, words, rows, watch
        self.first, self.size = first, size

    def ask(self) -> bool:
        """Begin the turn; False if there is nothing to do."""
        told = np.flatnonzero(self.rows["order"])
        if not len(told):
            return False
        self.watch["copy"], self.watch["since"] = told[0], time.monotonic()
        self.watch["turns"] += 1
        if self.watch["asleep"][0]:
            with suppress(OSError):  # it has died: `hear` says so
                self.words.send_bytes(b"turn")
        return True

    def hear(self, timeout: float) -> None:
        """Wait for the end of the turn."""
        try:
            while not self.words.poll(self.watch["since"][0] + timeout - time.monotonic()):
                if time.monotonic() - self.watch["since"][0] > timeout:
                    self.kill()
                    raise self._fault(_overdue(timeout))
            said = self.words.recv_bytes()
        except (EOFError, OSError):
            self.process.join(GRACE)
            raise self._fault(f"ended its process ({_how(self.process.exitcode)})") from None
        if said:
            i, what = pickle.loads(said)
            raise self._fault(what, i)

    def _fault(self, what: str, i: int | None = None) -> Fault:
        i = int(self.watch["copy"][0]) if i is None else i
        return Fault(self.first + i * self.size, what)

    def kill(self) -> None:
        """The process, and whatever the world has started."""
        if self.process.is_alive():
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # if it has no group of its own yet
        self.process.join()


def _overdue(timeout: float) -> str:
    return f"gave no answer within world_timeout={timeout:g} seconds"


def _how(code: int | None) -> str:
    return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name


@contextmanager
def _blocked() -> Iterator[None]:
    """What is started here does not get the parent's signals before it can say what to do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _as_main_for(world: ExternalWorld) -> Iterator[None]:
    """Spare workers the parent's script, unless the world is built by something in it.

    They would import it anew, and a script that trains when it is imported would not survive that.
    """
    try:
        needed = world.copies == 1 or b"__main__" in pickle.dumps(world.build)
    except Exception as problem:
        raise UsageError(
            f"world '{world.name}' cannot be sent to other processes ({problem}); build it with a "
            "function at the top of a module, or say that there is one copy at most."
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
    """Interrupt a world in this process; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise _Overdue(_overdue(seconds))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- the worker ---------------------------------------------------------------------------------


def _work(
    build: Callable[[], ExternalEnv],
    agents: Sequence[AgentSpec],
    memory: Any,
    watch: Any,
    first: int,
    size: int,
    words: Connection,
) -> None:
    """The life of a worker: turn after turn until the pipe is closed."""
    os.setsid()  # Ctrl-C reaches neither it nor what the world starts
    for number in OURS:
        signal.signal(number, lambda *_: None)  # what the world starts gets the usual handlers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OURS)
    os.dup2(2, 1)  # the parent's stdout is not for worlds
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    group = _Group(build, agents, np.frombuffer(memory, row_type(agents))[first::size])
    busy = np.frombuffer(watch, WATCH)[first : first + 1]

    def note(i: int) -> None:
        busy["copy"], busy["since"] = i, time.monotonic()

    try:
        with suppress(EOFError, OSError):
            for turn in itertools.count(1):
                _await(turn, busy, words)
                fault = group.turn(note)
                words.send_bytes(pickle.dumps(fault) if fault else b"")
    finally:
        group.close()


def _await(turn: int, watch: np.ndarray, words: Connection) -> None:
    """Until so many turns have begun: awake at first, for it takes long to wake a process up."""
    until = time.monotonic() + AWAKE
    while watch["turns"][0] < turn:
        if time.monotonic() < until:
            os.sched_yield()
            continue
        watch["asleep"] = True
        if watch["turns"][0] < turn and words.poll(0.1):  # both may have looked too early
            words.recv_bytes()
    watch["asleep"] = False


def _outlive_nobody() -> None:
    """A worker whose parent was killed ends by itself, even if its world hangs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)
