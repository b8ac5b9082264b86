"""Teams in trouble: kills at any instant, and messages late, lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import random
import socket
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PRIVATE, SMALL, python

from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.network import keys, party, roster_file, transport
from pevdn.network import member as process
from pevdn.network.compiled_agent import CompiledAgent
from pevdn.network.party import Party
from pevdn.network.protocol import Protocol
from pevdn.network.randomness import FromSeed
from pevdn.network.recovery import Journal
from pevdn.network.roster import WORLD, Roster
from pevdn.network.transport import Transport
from pevdn.network.world_server import WorldServer
from pevdn.worlds.toy import Coordination

SEED = int(os.environ.get("PEVDN_CHAOS_SEED", "0"))
SECONDS = float(os.environ.get("PEVDN_CHAOS_SECONDS", "600"))  # of the slow test
SMALLEST = {"learning_starts": 4, "eval_episodes": 2, "buffer_size": 16, "update_every": 1}
ALGORITHMS = {"pe-vdn-b": SMALL, "pe-vdn-c": PRIVATE, "pe-vdn-d": {**PRIVATE, "openings": 2}}
SNAPSHOTS = 6  # steps from one to the next
DEADLINE = 90.0  # seconds after which somebody hangs
AGENTS = 3
PATIENCE = 25.0  # seconds
COMPILED = functools.cache(CompiledAgent)
ENDS: list[Any] = []  # gRPC crashes if a server is freed while a call of it is still in some task


def in_a_toy_world(patch: pytest.MonkeyPatch) -> None:
    """That has work for three."""
    patch.setattr(worlds, "make", lambda name: Coordination(AGENTS))
    patch.setattr(worlds, "team_size", lambda name: AGENTS)
    patch.setattr(party, "SNAPSHOT_EVERY", SNAPSHOTS)


# ---- trouble ----------------------------------------------------------------------------------


class Killed(BaseException):
    """A member is no more: no handler of `Exception` sees this, as none sees a SIGKILL."""


class Trouble:
    """What goes wrong, drawn from a seed."""

    def __init__(self, seed: int, quiet: bool = False) -> None:
        self.random = random.Random(seed)
        self.quiet = quiet
        self.happened: Counter[str] = Counter()
        self._late: set[asyncio.Task[None]] = set()

    def strikes(self, what: str, probability: float) -> bool:
        struck = not self.quiet and self.random.random() < probability
        self.happened[what] += struck
        return struck

    # messages

    def on_the_way(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`Transport._attempt` on a bad line."""

        async def attempt(one: Transport, to: str, data: bytes, timeout: float) -> Any:
            if self.strikes("delayed", 0.1):
                await asyncio.sleep(self.random.choice([0.01, 0.05, 0.05, 0.5]))
            if self.strikes("dropped", 0.03):
                raise _no_answer("it was dropped")
            if self.strikes("overtaken", 0.02):  # thought to be lost, it arrives after all
                self._later(real(one, to, data, timeout))
                raise _no_answer("it was late")
            receipt = await real(one, to, data, timeout)
            if self.strikes("doubled", 0.05):
                self._later(real(one, to, data, timeout))
            if self.strikes("receipt dropped", 0.03):
                raise _no_answer("the receipt was dropped")
            return receipt

        return attempt

    def _later(self, work: Coroutine[Any, Any, Any]) -> None:
        pause = self.random.choice([0.0, 0.02, 0.2, 1.0])

        async def wait_and_send() -> None:
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                work.close()
                raise
            with contextlib.suppress(Exception):  # whoever sent it may be gone by now
                await work

        task = asyncio.create_task(wait_and_send())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    # files

    def at_the_disk(self, real: Callable[..., Any], file_of: Any) -> Callable[..., Any]:
        """A method that writes a line or a file, with kills before, in the middle and after."""

        def write(one: Any, *args: Any, **named: Any) -> Any:
            if self.strikes("killed before a write", 0.01):
                raise Killed
            path, head = file_of(one), one.folder / "ledger.head"
            size = path.stat().st_size if path is not None and path.exists() else 0
            before = head.read_bytes() if head.exists() else None
            found = real(one, *args, **named)
            if path is not None and self.strikes("killed in a write", 0.01):
                with path.open("r+b") as file:
                    file.truncate(self.random.randint(size, path.stat().st_size - 1))
                if before is not None:
                    head.write_bytes(before)
                raise Killed
            if self.strikes("killed after a write", 0.01):
                raise Killed
            return found

        return write


def _no_answer(why: str) -> Exception:
    nothing = transport.grpc.aio.Metadata()
    code = transport.grpc.StatusCode.UNAVAILABLE
    return transport.grpc.aio.AioRpcError(code, nothing, nothing, details=why)


# ---- witnesses --------------------------------------------------------------------------------


def witness(patch: Any, folder: Path) -> None:
    """Everything that has to be right is written down where it happens."""
    folder.mkdir(exist_ok=True)

    def write(name: str, **facts: Any) -> None:
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def packed(words: np.ndarray) -> str:
        return base64.b64encode(words.tobytes()).decode()

    real_sum, real_append, real_noise = Protocol.open_sum, Journal.append, FromSeed.noise

    async def opened(one: Protocol, step: int, words: np.ndarray) -> np.ndarray:
        write(one.me, said=packed(words), step=step)
        total = await real_sum(one, step, words)
        write(one.me, opened=packed(total), step=step)
        return total

    def append(one: Journal, outcome: Any) -> None:
        real_append(one, outcome)
        write(one.folder.name.removesuffix(".data"), completed=outcome.step)

    def noise(one: FromSeed, step: int, *rest: int) -> np.ndarray:
        write(f"agent-{one._index}", noised=step)
        return real_noise(one, step, *rest)

    patch.setattr(Protocol, "open_sum", opened)
    patch.setattr(Journal, "append", append)
    patch.setattr(FromSeed, "noise", noise)


def seen(folder: Path, name: str, what: str) -> list[dict[str, Any]]:
    lines = (folder / f"{name}.jsonl").read_bytes().split(b"\n")[:-1]
    return [fact for fact in map(json.loads, lines) if what in fact]


def words_of(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint32)


# ---- a team -----------------------------------------------------------------------------------


def make_team(
    out: Path, algorithm: str, mode: str, steps: int, seed: int, patience: float = PATIENCE
) -> Roster:
    settings = {**ALGORITHMS[algorithm], **SMALLEST}
    wanted = config.make(algorithm, "toy:coordination", steps, 1, seed, settings)
    *ports, last = quiet_ports(AGENTS + 1)
    parties = [(f"agent-{i}", f"127.0.0.1:{port}") for i, port in enumerate(ports)]
    return keys.create(out, wanted, parties, f"127.0.0.1:{last}", mode, patience, True)


def quiet_ports(count: int) -> list[int]:
    """Ports that no outgoing connection gets while a member is down."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


def data_of(roster: Roster, name: str) -> Path:
    return process.data_of(roster.path, name)


def build(roster: Roster, name: str) -> Party | WorldServer:
    key = roster_file.private_key(roster.path.parent / f"{name}.key", roster.member(name))
    if name == WORLD:
        return WorldServer(roster, key, data_of(roster, name))
    return Party(roster, name, key, data_of(roster, name))


class InOneProcess:
    """All members over real transports; one that is killed is built again from its files."""

    def __init__(self, roster: Roster, trouble: Trouble, between: float) -> None:
        self.roster, self.trouble, self.between = roster, trouble, between
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.alive: dict[str, Party | WorldServer] = {}
        self.dead: set[Any] = set()
        self.busy: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.kills = 0
        self.ended: set[str] = set()
        self.spared: set[str] = set()  # killed after one had ended: left alone from then on

    async def run(self) -> dict[str, Party]:
        """The parties, once all members have ended."""
        killer = asyncio.create_task(self._kill())
        try:
            await asyncio.gather(*(self._keep_up(name) for name in self.roster.names))
        finally:
            killer.cancel()
        return {name: one for name, one in self.alive.items() if isinstance(one, Party)}

    async def _keep_up(self, name: str) -> None:
        while True:
            try:
                one = await asyncio.to_thread(self._build, name)
                self.tasks[name] = task = asyncio.create_task(one.run())
                await asyncio.wait([task])
                self.tasks.pop(name, None)
                if not task.cancelled():
                    task.result()
                    self.ended.add(name)
                    return
            except Killed:
                pass
            self.dead.add(self.alive.pop(name, None))
            self.kills += 1
            await asyncio.sleep(self.trouble.random.choice([0.0, 0.1, 0.5]))

    def _build(self, name: str) -> Party | WorldServer:
        """From its files, once no thread of its predecessor writes to them."""
        with self.busy[name]:
            self.alive[name] = one = build(self.roster, name)
        if isinstance(one, Party):
            real = one._compute

            def work_of_the_living(work: Callable[..., Any], *args: Any) -> Any:
                with self.busy[name]:
                    if one in self.dead:
                        raise Killed
                    return work(*args)

            one._compute = functools.partial(real, work_of_the_living)  # type: ignore[method-assign]
        return one

    async def _kill(self) -> None:
        while True:
            await asyncio.sleep(self.trouble.random.uniform(0.5, 1.5) * self.between)
            mortal = sorted(set(self.tasks) - self.spared)
            if mortal and self.trouble.strikes("killed", 1.0):
                name = self.trouble.random.choice(mortal)
                self.tasks.pop(name).cancel()
                self.spared |= {name} if self.ended else set()  # it may have to wait for a while


def train(roster: Roster, trouble: Trouble, between: float) -> tuple[dict[str, Party], int]:
    team = InOneProcess(roster, trouble, between)

    async def all_of_it() -> dict[str, Party]:
        everything = asyncio.create_task(team.run())
        await asyncio.wait([everything], timeout=DEADLINE)
        states = {name: one.status.report() for name, one in team.alive.items()}
        shown = {name: (r["state"], r.get("step")) for name, r in states.items()}
        assert everything.done(), f"a member hangs after {team.kills} kills: {shown}"
        return everything.result()

    return asyncio.run(all_of_it()), team.kills


class InProcesses:
    """Every member a process, some of them killed with SIGKILL and started again."""

    def __init__(self, roster: Roster, folder: Path, trouble: Trouble, between: float) -> None:
        self.roster, self.folder, self.trouble, self.between = roster, folder, trouble, between
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.kills = 0

    def run(self) -> None:
        """Until all have ended."""
        deadline, whole = time.monotonic() + 10 * DEADLINE, True
        for name in self.roster.names:
            self._start(name)
        try:
            kill_at = self._soon()
            while self.running:
                time.sleep(0.05)
                assert time.monotonic() < deadline, f"{sorted(self.running)} hang"
                # Once somebody has left, all have finished: who is killed then finds nobody.
                if whole and time.monotonic() > kill_at:
                    self.running[self.trouble.random.choice(sorted(self.running))].kill()
                    self.kills, kill_at = self.kills + 1, self._soon()
                for name, code in [(n, p.poll()) for n, p in self.running.items()]:
                    if code is None:
                        continue
                    words = (self.folder / f"{name}.txt").read_text()
                    assert code <= 0, f"{name} ended with {words[-2000:]}"
                    del self.running[name]
                    if code < 0:
                        self._start(name)
                    else:
                        whole = False
        finally:
            for process in self.running.values():
                process.kill()
                process.wait()

    def _soon(self) -> float:
        return time.monotonic() + self.trouble.random.uniform(0.2, 1.8) * self.between

    def _start(self, name: str) -> None:
        here = Path(__file__).parent
        program = (
            f"import sys; sys.path[:0] = {[str(here), str(here.parent)]!r}; import conftest; "
            "from network_chaos import take_part; take_part(*sys.argv[1:])"
        )
        seed = self.trouble.random.randrange(2**32)
        with (self.folder / f"{name}.txt").open("a") as words:
            self.running[name] = python(
                program,
                self.roster.path,
                name,
                self.folder,
                seed,
                stdout=words,
                stderr=words,
                env={"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
            )


def take_part(team: str, me: str, folder: str, seed: str) -> None:
    """A member in a process of its own, on a bad line."""
    patch = pytest.MonkeyPatch()
    in_a_toy_world(patch)
    attempt = Trouble(int(seed)).on_the_way(Transport._attempt)
    patch.setattr(Transport, "_attempt", attempt)
    witness(patch, Path(folder))
    process.run_member(Path(team), me)
