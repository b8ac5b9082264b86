"""A team in trouble: members die at any instant; messages are late, lost, doubled or disordered.

Whatever happens, a training ends where an undisturbed one of the same seed ends.
"""

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

import jax
import numpy as np
import pytest
from support import PRIVATE, SMALL, python

from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.config.experiment import fingerprint
from pevdn.network import keys, party, transport
from pevdn.network import member as process
from pevdn.network import roster as rosters
from pevdn.network import wire_pb2 as wire
from pevdn.network import world_server as stage
from pevdn.network.group import Group, Stopped
from pevdn.network.mind import Mind
from pevdn.network.party import Party
from pevdn.network.randomness import Rehearsal
from pevdn.network.recovery import Journal
from pevdn.network.roster import WORLD, Roster
from pevdn.network.transport import Transport
from pevdn.network.world_server import WorldServer
from pevdn.privacy.ledger import Ledger
from pevdn.worlds.toy import Coordination

SEED = int(os.environ.get("PEVDN_CHAOS_SEED", "0"))
SECONDS = float(os.environ.get("PEVDN_CHAOS_SECONDS", "600"))  # of the slow test
SMALLEST = {"learning_starts": 4, "eval_episodes": 2, "buffer_size": 16, "update_every": 1}
ALGORITHMS = {"pe-vdn-b": SMALL, "pe-vdn-c": PRIVATE}
SNAPSHOTS = 6  # rounds from one to the next
DEADLINE = 90.0  # seconds after which somebody hangs
AGENTS = 3
PATIENCE = 25.0  # seconds
COMPILED = functools.cache(Mind)
ENDS: list[Any] = []  # gRPC crashes if a server is freed while a call of it is still in some task


def in_a_toy_world(patch: pytest.MonkeyPatch) -> None:
    """That has work for three."""
    patch.setattr(worlds, "make", lambda name: Coordination(AGENTS))
    patch.setattr(worlds, "team_size", lambda name: AGENTS)
    patch.setattr(party, "SNAPSHOT", SNAPSHOTS)


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

    real_sum, real_append, real_noise = Party._sum, Journal.append, Rehearsal.noise

    async def opened(one: Party, round: int, words: np.ndarray) -> np.ndarray:
        write(one.me, said=packed(words), round=round)
        total = await real_sum(one, round, words)
        write(one.me, opened=packed(total), round=round)
        return total

    def append(one: Journal, record: Any) -> None:
        real_append(one, record)
        write(one.folder.name.removesuffix(".data"), completed=record.round)

    def noise(one: Rehearsal, round: int, *rest: int) -> np.ndarray:
        *_, index, _, _ = rest
        write(f"agent-{index}", noised=round)
        return real_noise(one, round, *rest)

    patch.setattr(Party, "_sum", opened)
    patch.setattr(Journal, "append", append)
    patch.setattr(Rehearsal, "noise", noise)


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
    key = rosters.private_key(roster.path.parent / f"{name}.key", roster.member(name))
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


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Programs are compiled once, though members are built again and again."""
    in_a_toy_world(monkeypatch)
    monkeypatch.setattr(party, "Mind", COMPILED)
    begin = Transport.start

    async def start(one: Transport) -> None:
        await begin(one)
        ENDS.extend([one._server, *one._channels.values()])

    monkeypatch.setattr(Transport, "start", start)
    first = WorldServer.__init__
    kept: list[Any] = []

    def share(one: WorldServer, *args: Any, **named: Any) -> None:
        first(one, *args, **named)
        kept[:] = kept or [one.episodes.programs]
        (one.episodes.programs,) = kept

    monkeypatch.setattr(stage.WorldServer, "__init__", share)
    return monkeypatch


def train(roster: Roster, trouble: Trouble, between: float) -> tuple[dict[str, Party], int]:
    team = InOneProcess(roster, trouble, between)

    async def all_of_it() -> dict[str, Party]:
        everything = asyncio.create_task(team.run())
        await asyncio.wait([everything], timeout=DEADLINE)
        states = {name: one.status.report() for name, one in team.alive.items()}
        told = {name: (r["state"], r.get("round")) for name, r in states.items()}
        assert everything.done(), f"somebody hangs after {team.kills} kills: {told}"
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
        here = str(Path(__file__).parent)
        tests = str(Path(__file__).parents[1])
        program = (
            f"import sys; sys.path[:0] = {[here, tests]!r}; import conftest; "
            "from test_chaos import take_part; take_part(*sys.argv[1:])"
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


# ---- claims -----------------------------------------------------------------------------------


def assert_no_wrong_sum(roster: Roster, folder: Path) -> None:
    """Whatever was opened is the integer sum of what all parties encoded, modulo p."""
    said: dict[int, dict[str, str]] = {}
    for one in roster.parties:
        for fact in seen(folder, one.name, "said"):
            before = said.setdefault(fact["round"], {}).setdefault(one.name, fact["said"])
            assert before == fact["said"], "a round that is tried again has the same messages"
    opened = 0
    for one in roster.parties:
        for fact in seen(folder, one.name, "opened"):
            words = [words_of(text).astype(object) for text in said[fact["round"]].values()]
            assert len(words) == len(roster.parties)
            total = sum(words) % roster.config.settings.modulus
            assert words_of(fact["opened"]).tolist() == total.tolist()
            opened += 1
    assert opened


def assert_no_round_is_lost_or_doubled(
    roster: Roster, folder: Path, rounds: int, kills: int
) -> None:
    for one in roster.parties:
        journal = Journal(data_of(roster, one.name))
        found = journal.load()
        assert found is not None
        on_disk = [record.round for record in found[2]]
        assert on_disk == list(range(journal._base + 1, rounds + 1))
        told = [fact["completed"] for fact in seen(folder, one.name, "completed")]
        assert told == sorted(set(told)), "a round was completed twice"
        # Between the journal and the witness a member may have been killed.
        assert len(set(range(1, rounds + 1)) - set(told)) <= kills
        assert max(told) <= rounds


def assert_nothing_is_under_counted(roster: Roster, folder: Path, least: int) -> None:
    """Every noised update is in the ledger, and the exposure is at least the undisturbed one's."""
    for one in roster.parties:
        ledger = Ledger.read(data_of(roster, one.name), fingerprint(roster.config))
        assert ledger.counted[0] >= len(seen(folder, one.name, "noised"))
        assert ledger.exposure[0] >= least


def parameters(one: Party) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(one.learner)]


def assert_same_end(parties: dict[str, Party], undisturbed: dict[str, Party]) -> None:
    for name, one in parties.items():
        # Seeds of minibatches come from everybody's secret, but in a rehearsal nothing is drawn
        # from them.
        wanted = undisturbed[name].course
        assert one.course.round == wanted.round
        assert (one.course.updates, one.course.env_steps) == (wanted.updates, wanted.env_steps)
        pairs = zip(parameters(one), parameters(undisturbed[name]), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs), f"{name} has other parameters"


def assert_undisturbed(
    roster: Roster,
    parties: dict[str, Any],
    folder: Path,
    undisturbed: dict[str, Party],
    kills: int,
) -> None:
    first = undisturbed["agent-0"]
    assert_no_wrong_sum(roster, folder)
    assert_no_round_is_lost_or_doubled(roster, folder, first.course.round, kills)
    assert_same_end(parties, undisturbed)
    if first.ledger is not None:
        assert_nothing_is_under_counted(roster, folder, first.ledger.exposure[0])


@pytest.mark.parametrize(
    ("algorithm", "mode"), [("pe-vdn-b", "shares"), ("pe-vdn-c", "pairwise-masks")]
)
def test_a_team_in_trouble_ends_where_an_undisturbed_one_does(
    algorithm: str, mode: str, one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calm = make_team(tmp_path / "calm", algorithm, mode, 40, SEED)
    undisturbed, _ = train(calm, Trouble(0, quiet=True), 1e6)

    roster = make_team(tmp_path / "chaos", algorithm, mode, 40, SEED)
    trouble = Trouble(SEED)
    one_process.setattr(Transport, "_attempt", trouble.on_the_way(Transport._attempt))
    for kind, method, file_of in [
        (Journal, "append", lambda journal: journal._path()),
        (Journal, "keep", lambda journal: None),
        (Journal, "save", lambda journal: None),
        (Ledger, "_append", lambda ledger: ledger.folder / "ledger.jsonl"),
    ]:
        real = getattr(kind, method)
        one_process.setattr(kind, method, trouble.at_the_disk(real, file_of))
    witness(one_process, tmp_path / "seen")
    began = time.monotonic()
    parties, kills = train(roster, trouble, 2.0)
    print(dict(trouble.happened), kills, "kills,", f"{time.monotonic() - began:.1f} s")

    assert kills > 2
    assert_undisturbed(roster, parties, tmp_path / "seen", undisturbed, kills)


@pytest.mark.slow
def test_processes_killed_for_minutes_end_where_undisturbed_ones_do(
    one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Trainings one after the other for PEVDN_CHAOS_SECONDS (600), seeds from PEVDN_CHAOS_SEED."""
    until, seed = time.monotonic() + SECONDS, SEED
    while time.monotonic() < until:
        algorithm, mode = list(ALGORITHMS)[seed % 2], rosters.MODES[seed // 2 % 2]
        calm = make_team(tmp_path / f"calm-{seed}", algorithm, mode, 60, seed)
        undisturbed, _ = train(calm, Trouble(0, quiet=True), 1e6)
        roster = make_team(tmp_path / f"chaos-{seed}", algorithm, mode, 60, seed, patience=90.0)
        folder = tmp_path / f"seen-{seed}"
        folder.mkdir()
        began = time.monotonic()
        team = InProcesses(roster, folder, Trouble(seed), 8.0)
        team.run()
        print(f"{algorithm}, {mode}, {seed}: {team.kills} kills, {time.monotonic() - began:.0f} s")
        parties = {one.name: build(roster, one.name) for one in roster.parties}
        assert_undisturbed(roster, parties, folder, undisturbed, team.kills)
        seed += 1


# ---- troubles that a random draw seldom hits ----------------------------------------------------


def test_a_hello_that_was_overtaken_replaces_no_later_one(
    one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    roster = make_team(tmp_path, "pe-vdn-b", "shares", 40, SEED)
    alice, bob = (build(roster, name).group for name in ("agent-0", "agent-1"))
    early = bob._hello()
    bob.receive(alice._hello())
    late = bob._hello()
    alice.receive(late)
    alice.receive(early)
    assert list(alice.heard["agent-1"].names) == ["agent-0", "agent-1"]


def test_who_was_killed_between_two_farewells_says_them_again(
    one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    roster = make_team(tmp_path, "pe-vdn-b", "shares", 12, SEED)
    real, killed = Group.say_farewell, []

    async def say_farewell(one: Group, reason: str, seconds: float) -> None:
        if one.me == "agent-0" and not killed:
            killed.append(one.me)
            envelope = one._envelope(0, farewell=wire.Farewell(reason=reason))
            await one.transport.send("agent-1", envelope, until=time.monotonic() + 5)
            raise Killed
        await real(one, reason, seconds)

    one_process.setattr(Group, "say_farewell", say_farewell)
    parties, kills = train(roster, Trouble(0, quiet=True), 1e6)
    assert kills == 1
    assert {one.course.round for one in parties.values()} == {parties["agent-0"].course.round}


def test_who_was_killed_after_the_last_round_comes_back_for_who_missed_its_end(
    one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    roster = make_team(tmp_path, "pe-vdn-b", "shares", 12, SEED)
    real, killed = Party._complete, set()

    async def complete(one: Party, record: Any, thought: Any = None) -> None:
        last = record.kind == "evaluate" and one.course.env_steps >= 12
        if last and one.me not in killed:
            killed.add(one.me)
            if one.me != "agent-0":  # for them, the round is over
                one.journal.append(record)
            raise Killed
        await real(one, record, thought)

    one_process.setattr(Party, "_complete", complete)
    parties, kills = train(roster, Trouble(0, quiet=True), 1e6)
    assert kills == AGENTS
    assert len({one.course.round for one in parties.values()}) == 1


@pytest.mark.slow
def test_nobody_waits_for_ever_for_one_who_does_not_come_back(
    one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not the world either, which waits for episodes to be asked for while parties learn."""
    roster = make_team(tmp_path, "pe-vdn-b", "shares", 40, SEED, patience=6.0)
    real = Party._update

    async def update(one: Party) -> Any:
        if one.me == "agent-0":
            raise Killed
        return await real(one)

    one_process.setattr(Party, "_update", update)

    async def all_of_it() -> dict[str, BaseException | None]:
        tasks = {name: asyncio.create_task(build(roster, name).run()) for name in roster.names}
        _, hanging = await asyncio.wait(tasks.values(), timeout=DEADLINE)
        assert not hanging, [name for name, task in tasks.items() if task in hanging]
        return {name: task.exception() for name, task in tasks.items()}

    ends = asyncio.run(all_of_it())
    assert isinstance(ends.pop("agent-0"), Killed)
    for problem in ends.values():
        assert isinstance(problem, Stopped)
        assert "agent-0 did not answer for 6 seconds" in str(problem)


@pytest.mark.slow
def test_who_missed_the_last_round_gets_it_from_others_that_had_left(
    one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All are started again, as the sentence says that it stops with."""
    roster = make_team(tmp_path, "pe-vdn-b", "shares", 12, SEED, patience=6.0)
    real, killed = Party._complete, []

    async def complete(one: Party, record: Any, thought: Any = None) -> None:
        last = record.kind == "evaluate" and one.course.env_steps >= 12
        if last and one.me == "agent-0" and not killed:
            killed.append(one.me)
            raise Killed
        await real(one, record, thought)

    one_process.setattr(Party, "_complete", complete)

    async def all_of_it() -> dict[str, BaseException | None]:
        tasks = {name: asyncio.create_task(build(roster, name).run()) for name in roster.names}
        await asyncio.wait(tasks.values(), timeout=DEADLINE)
        return {name: task.exception() for name, task in tasks.items()}

    def rounds() -> list[int]:
        parties = [build(roster, one.name) for one in roster.parties]
        return [one.course.round for one in parties if isinstance(one, Party)]

    ends = asyncio.run(all_of_it())
    assert isinstance(ends.pop("agent-0"), Killed)
    assert set(ends.values()) == {None}
    first, second, third = rounds()
    assert first + 1 == second == third
    assert set(asyncio.run(all_of_it()).values()) == {None}
    assert rounds() == [second] * AGENTS
