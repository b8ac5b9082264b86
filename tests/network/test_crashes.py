"""Members that are killed: the team ends where an undisturbed one does."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from network_team import (
    Killed,
    Safe,
    assert_same,
    events,
    is_exactly,
    listen,
    make_team,
    members_of,
    metrics_of,
    party_of,
    play,
    play_on,
    twins,
)
from support import Said, start

from pevdn.config.experiment import fingerprint
from pevdn.errors import PevdnError
from pevdn.network import local
from pevdn.network import party as parties
from pevdn.network import wire_pb2 as wire
from pevdn.network.party import Party
from pevdn.network.recovery import Journal
from pevdn.network.roster import Roster
from pevdn.privacy.accounting import Spent
from pevdn.privacy.ledger import Ledger

pytestmark = pytest.mark.usefixtures("shared_programs")


class Fate:
    """Kills a member at the n-th of its messages and writes to disk, n drawn anew for every life.

    A write is killed before it, after it, or, if it is a line, in the middle.
    """

    def __init__(self, seed: int, deaths: int) -> None:
        self.dice, self.deaths = random.Random(seed), deaths
        self.updates = 0  # that were made with noise in all lives, but while one began

    def of(self, member: Any) -> None:
        self.left, self.dead = self.dice.randrange(1, 60), False
        transport = member.group.transport
        self.wrap(transport, "send")
        if not isinstance(member, Party):
            return
        for what in ("append", "write_block", "save"):
            self.wrap(member.state.journal, what)
        if member.state.ledger is not None:
            self.wrap(member.state.ledger, "_append")
            noise = member.state.random.noise

            def counted(*args: Any) -> Any:
                self.updates += 1
                return noise(*args)

            member.state.random.noise = counted  # type: ignore[method-assign]

    def wrap(self, holder: Any, what: str) -> None:
        real = getattr(holder, what)

        def now() -> bool:
            self.left -= 1
            if self.left == 0 and self.deaths:
                self.deaths, self.dead = self.deaths - 1, True
                return True
            if self.dead:  # it sends and writes nothing any more
                raise Killed(what)
            return False

        def done(*args: Any, **options: Any) -> Any:
            if not now():
                return real(*args, **options)
            when = self.dice.choice(["before", "after", "half"])
            if when == "after":
                real(*args, **options)
            elif when == "half" and what == "append":
                with holder._path().open("ab") as file:
                    file.write(b'{"step": 7, "wor')
            elif when == "half" and what == "_append":
                with (holder.folder / "ledger.jsonl").open("ab") as file:
                    file.write(b'{"line": 7, "ki')
            raise Killed(what)

        async def sent(*args: Any, **options: Any) -> Any:
            if not now():
                return await real(*args, **options)
            if self.dice.random() < 0.5:
                await real(*args, **options)
            raise Killed(what)

        setattr(holder, what, sent if what == "send" else done)


def assert_files_whole(member: Party) -> None:
    """The files hold a chain of steps, and the ledger misses no update."""
    found = Journal(member.folder).load()
    assert found is not None
    _, facts, outcomes = found
    first = facts["progress"]["step"] + 1
    assert [outcome.step for outcome in outcomes] == list(range(first, first + len(outcomes)))


@pytest.mark.parametrize(
    ("algorithm", "mode", "rehearsal", "snapshot"),
    [
        ("pe-vdn-b", "pairwise-masks", True, 200),
        ("pe-vdn-c", "shares", False, 7),
        ("pe-vdn-d", "shares", False, 5),
    ],
)
def test_a_team_whose_members_die_ends_where_one_that_is_left_alone_does(
    algorithm: str,
    mode: str,
    rehearsal: bool,
    snapshot: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_salt: None,
) -> None:
    monkeypatch.setattr(parties, "SNAPSHOT_EVERY", snapshot)
    calm, wild = twins(tmp_path, algorithm, mode, steps=100, rehearsal=rehearsal)
    members = members_of(calm)
    assert play(members) == {}
    fates = {name: Fate(seed, deaths=5) for seed, name in enumerate(wild.names)}
    made: dict[str, int] = defaultdict(int)

    def check(member: Any) -> None:
        if not isinstance(member, Party):
            return
        assert_files_whole(member)
        assert member.state.progress.step >= made[member.me] - 1
        made[member.me] = member.state.progress.step
        if member.state.ledger is not None:
            ledger = Ledger.read(member.folder, fingerprint(wild.config))
            assert ledger.counted[0] >= fates[member.me].updates

    survivors = play_on(wild, fates, check)
    assert [fate.deaths for fate in fates.values()] == [0, 0, 0]
    for name in ("alice", "bob"):
        assert_same(survivors[name], members[name])
        assert metrics_without_cost(survivors[name]) == metrics_without_cost(members[name])
        if survivors[name].state.ledger is not None:
            counted = Ledger.read(survivors[name].folder, fingerprint(wild.config))
            wanted = members[name].state.progress.updates
            assert counted.counted[0] >= max(fates[name].updates, wanted)
            assert counted.exposure[0] >= members[name].state.ledger.exposure[0]


def metrics_without_cost(member: Party) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name not in Spent._fields}
        for line in metrics_of(member.folder)
    ]


class DiesAfterUpdates:
    """Kills a party after the third update that it books in a life, a few times."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths

    def of(self, member: Party) -> None:
        ledger = member.state.ledger
        assert ledger is not None
        settle, left = ledger.settle, [3]

        def settled(*args: Any) -> None:
            settle(*args)
            left[0] -= 1
            if left[0] == 0 and self.deaths:
                self.deaths -= 1
                raise Killed("settled")

        ledger.settle = settled  # type: ignore[method-assign]


@pytest.mark.parametrize("algorithm", ["pe-vdn-c", "pe-vdn-d"])
def test_a_party_with_real_salts_repeats_its_settled_updates_after_every_kill(
    algorithm: str, tmp_path: Path
) -> None:
    """All deaths come before the first snapshot, so every life repeats those before it."""
    team = make_team(tmp_path / "team", algorithm, steps=32, rehearsal=False)
    bob = DiesAfterUpdates(deaths=3)
    survivors = play_on(team, {"alice": Safe(), "bob": bob, "world": Safe()})
    assert bob.deaths == 0
    alice, bobs = (survivors[name].state.ledger for name in ("alice", "bob"))
    assert bobs.exposure == alice.exposure and bobs.lost == [0]
    assert len(set(map(bobs.salt, range(1, survivors["bob"].state.progress.step)))) == 4


class DiesBefore:
    """Kills a party once, before it writes the outcome of a step that its peers complete."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def of(self, member: Party) -> None:
        append, kind = member.state.journal.append, self.kind

        def dies(outcome: Any) -> None:
            if outcome.kind == self.kind:
                self.kind = ""
                raise Killed(kind)
            append(outcome)

        member.state.journal.append = dies  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        *(("pe-vdn-b", kind) for kind in ("play", "update", "evaluate")),
        *(("pe-vdn-d", kind) for kind in ("play", "open")),
    ],
)
def test_a_party_that_missed_the_end_of_a_step_recalls_it_from_its_peers(
    algorithm: str, kind: str, tmp_path: Path
) -> None:
    calm, wild = twins(tmp_path, algorithm, steps=16)
    members = members_of(calm)
    assert play(members) == {}
    fates = {"alice": Safe(), "bob": DiesBefore(kind), "world": Safe()}
    survivors = play_on(wild, fates)
    assert events(survivors["bob"]).count("caught up") == 1
    assert "caught up" not in events(survivors["alice"])
    for name in ("alice", "bob"):
        assert_same(survivors[name], members[name])


def test_an_impossible_outcome_is_never_written_to_the_journal(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", steps=16, patience=5)

    class Forgetful:
        def of(self, member: Party) -> None:
            def wrong(step: int) -> wire.Outcome:
                return wire.Outcome(kind="update", words=bytes(8))

            member.group.outcome_of = wrong

    with pytest.raises(PevdnError, match="alice reported an impossible outcome of step"):
        play_on(team, {"alice": Forgetful(), "bob": DiesBefore("update"), "world": Safe()})
    alice, bob = party_of(team, "alice"), party_of(team, "bob")
    assert bob.state.progress.step == alice.state.progress.step - 1


def test_independent_learners_stay_in_step_and_send_no_message(tmp_path: Path) -> None:
    calm, wild = twins(tmp_path, "iql", steps=40, parallel_episodes=4)
    members = members_of(calm)
    heard = listen(members, calm)
    assert play(members) == {}
    said = set()
    for _, _, data in heard.said:
        envelope = wire.Envelope()
        if is_exactly(envelope, data):
            said.add(envelope.WhichOneof("body"))
    assert not said & {"share", "partial_sum", "masked", "plain"}
    fates = {"alice": Safe(), "bob": DiesBefore("update"), "world": Safe()}
    survivors = play_on(wild, fates)
    for name in ("alice", "bob"):
        assert_same(survivors[name], members[name])
        last = [r for r in Journal(survivors[name].folder).load()[2]]  # type: ignore[index]
        assert all(len(outcome.words) == 0 for outcome in last if outcome.kind == "update")


class DiesAtTheEnd:
    """Kills a member once, after its last step and before its farewell."""

    def __init__(self) -> None:
        self.alive = True

    def of(self, member: Any) -> None:
        leave = member.group.leave

        async def dies() -> bool:
            if self.alive:
                self.alive = False
                raise Killed
            return bool(await leave())

        member.group.leave = dies


def test_a_party_that_dies_after_the_last_step_keeps_no_member_waiting(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", steps=4, patience=30)
    began = time.monotonic()
    survivors = play_on(team, {"alice": Safe(), "bob": DiesAtTheEnd(), "world": Safe()})
    assert time.monotonic() - began < 20
    assert survivors["bob"].state.all_finished
    began = time.monotonic()
    assert play({"alice": party_of(team, "alice")}) == {}  # started again: there is nothing to do
    assert time.monotonic() - began < 2


# --- as processes ----------------------------------------------------------------------------


def start_member(team: Roster, name: str) -> subprocess.Popen[str]:
    which = ["world"] if name == "world" else ["party", "--me", name]
    return start(*which, "--team", team.path, "--json")


def step_of(team: Roster) -> int:
    return int(local.reports(team).get("alice", {}).get("step", 0))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["pe-vdn-b", "pe-vdn-c"])
def test_processes_that_are_killed_end_where_others_do(algorithm: str, tmp_path: Path) -> None:
    calm, wild = twins(tmp_path, algorithm, steps=600)
    members = members_of(calm)
    assert play(members, 300) == {}
    dice = random.Random(6)
    processes = {name: start_member(wild, name) for name in wild.names}
    deadline = time.monotonic() + 540
    ended: dict[str, Said] = {}
    try:
        for victim in ["bob", "world", "alice", "bob", "world", "alice"]:
            before, until = step_of(wild), time.monotonic() + 60
            while step_of(wild) <= before + dice.randrange(10) and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(dice.random())
            if processes[victim].poll() is not None:
                break
            processes[victim].send_signal(signal.SIGKILL)
            processes[victim].communicate()
            processes[victim] = start_member(wild, victim)
        for name, process in processes.items():
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            ended[name] = Said(process.returncode, out, err)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [said.code for said in ended.values()] == [0, 0, 0], ended
    for name in ("alice", "bob"):
        assert_same(party_of(wild, name), members[name])
        if algorithm == "pe-vdn-c":
            ledger = Ledger.read(wild.path.parent / f"{name}.data", fingerprint(wild.config))
            assert ledger.counted[0] >= members[name].state.progress.updates
