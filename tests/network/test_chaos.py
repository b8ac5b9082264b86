"""A team in trouble: members die at any instant; messages are late, lost, doubled or disordered.

Whatever happens, a training ends where an undisturbed one of the same seed ends.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from network_chaos import (
    AGENTS,
    ALGORITHMS,
    COMPILED,
    DEADLINE,
    ENDS,
    SECONDS,
    SEED,
    InProcesses,
    Killed,
    Trouble,
    build,
    data_of,
    in_a_toy_world,
    make_team,
    seen,
    train,
    witness,
    words_of,
)
from support import slow

from pevdn.config.experiment import fingerprint
from pevdn.network import party
from pevdn.network import wire_pb2 as wire
from pevdn.network.group import Group
from pevdn.network.membership import Stopped
from pevdn.network.party import Party
from pevdn.network.recovery import Journal
from pevdn.network.roster import MODES, Roster
from pevdn.network.transport import Transport
from pevdn.network.world_server import WorldServer
from pevdn.privacy.ledger import Ledger


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Programs are compiled once, though members are built again and again."""
    in_a_toy_world(monkeypatch)
    monkeypatch.setattr(party, "CompiledAgent", COMPILED)
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

    monkeypatch.setattr(WorldServer, "__init__", share)
    return monkeypatch


# ---- claims -----------------------------------------------------------------------------------


def assert_no_wrong_sum(roster: Roster, folder: Path) -> None:
    """Whatever was opened is the integer sum of what all parties encoded, modulo p."""
    said: dict[int, dict[str, str]] = {}
    for one in roster.parties:
        for fact in seen(folder, one.name, "said"):
            before = said.setdefault(fact["step"], {}).setdefault(one.name, fact["said"])
            assert before == fact["said"], "a step that is tried again has the same messages"
    opened = 0
    for one in roster.parties:
        for fact in seen(folder, one.name, "opened"):
            words = [words_of(text).astype(object) for text in said[fact["step"]].values()]
            assert len(words) == len(roster.parties)
            total = sum(words) % roster.config.settings.modulus
            assert words_of(fact["opened"]).tolist() == total.tolist()
            opened += 1
    assert opened


def assert_no_step_is_lost_or_doubled(roster: Roster, folder: Path, steps: int, kills: int) -> None:
    for one in roster.parties:
        journal = Journal(data_of(roster, one.name))
        found = journal.load()
        assert found is not None
        on_disk = [outcome.step for outcome in found[2]]
        assert on_disk == list(range(journal._base + 1, steps + 1))
        written = [fact["completed"] for fact in seen(folder, one.name, "completed")]
        assert written == sorted(set(written)), "a step was completed twice"
        # Between the journal and the witness a member may have been killed.
        assert len(set(range(1, steps + 1)) - set(written)) <= kills
        assert max(written) <= steps


def assert_nothing_is_under_counted(roster: Roster, folder: Path, least: int) -> None:
    """Every noised update is in the ledger, and the exposure is at least the undisturbed one's."""
    for one in roster.parties:
        ledger = Ledger.read(data_of(roster, one.name), fingerprint(roster.config))
        assert ledger.counted[0] >= len(seen(folder, one.name, "noised"))
        assert ledger.exposure[0] >= least


def parameters(one: Party) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(one.state.learner)]


def assert_same_end(parties: dict[str, Party], undisturbed: dict[str, Party]) -> None:
    for name, one in parties.items():
        # Seeds of minibatches come from everybody's secret, but in a rehearsal nothing is drawn
        # from them.
        reached, wanted = one.state.progress, undisturbed[name].state.progress
        assert reached.step == wanted.step
        assert (reached.updates, reached.env_steps) == (wanted.updates, wanted.env_steps)
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
    assert_no_step_is_lost_or_doubled(roster, folder, first.state.progress.step, kills)
    assert_same_end(parties, undisturbed)
    if first.state.ledger is not None:
        assert_nothing_is_under_counted(roster, folder, first.state.ledger.exposure[0])


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [("pe-vdn-b", "shares"), ("pe-vdn-c", "pairwise-masks"), slow("pe-vdn-d", "pairwise-masks")],
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
        (Journal, "write_block", lambda journal: None),
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
        algorithm, mode = list(ALGORITHMS)[seed % 3], MODES[seed // 3 % 2]
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
    assert list(alice.members.hellos["agent-1"].names) == ["agent-0", "agent-1"]


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
    assert {one.state.progress.step for one in parties.values()} == {
        parties["agent-0"].state.progress.step
    }


def test_who_was_killed_after_the_last_step_comes_back_for_who_missed_its_end(
    one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    roster = make_team(tmp_path, "pe-vdn-b", "shares", 12, SEED)
    real, killed = Party._complete, set()

    async def complete(one: Party, outcome: Any, messages: Any = None) -> None:
        last = outcome.kind == "evaluate" and one.state.progress.env_steps >= 12
        if last and one.me not in killed:
            killed.add(one.me)
            if one.me != "agent-0":  # for them, the step is over
                one.state.journal.append(outcome)
            raise Killed
        await real(one, outcome, messages)

    one_process.setattr(Party, "_complete", complete)
    parties, kills = train(roster, Trouble(0, quiet=True), 1e6)
    assert kills == AGENTS
    assert len({one.state.progress.step for one in parties.values()}) == 1


@pytest.mark.slow
def test_nobody_waits_for_ever_for_one_who_does_not_come_back(
    one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not the world either, which waits for episodes to be asked for while parties learn."""
    roster = make_team(tmp_path, "pe-vdn-b", "shares", 40, SEED, patience=6.0)
    real = Party._update

    async def update(one: Party, step: int) -> Any:
        if one.me == "agent-0":
            raise Killed
        return await real(one, step)

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
def test_who_missed_the_last_step_gets_it_from_others_that_had_left(
    one_process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All are started again, as the sentence says that it stops with."""
    roster = make_team(tmp_path, "pe-vdn-b", "shares", 12, SEED, patience=6.0)
    real, killed = Party._complete, []

    async def complete(one: Party, outcome: Any, messages: Any = None) -> None:
        last = outcome.kind == "evaluate" and one.state.progress.env_steps >= 12
        if last and one.me == "agent-0" and not killed:
            killed.append(one.me)
            raise Killed
        await real(one, outcome, messages)

    one_process.setattr(Party, "_complete", complete)

    async def all_of_it() -> dict[str, BaseException | None]:
        tasks = {name: asyncio.create_task(build(roster, name).run()) for name in roster.names}
        await asyncio.wait(tasks.values(), timeout=DEADLINE)
        return {name: task.exception() for name, task in tasks.items()}

    def steps() -> list[int]:
        parties = [build(roster, one.name) for one in roster.parties]
        return [one.state.progress.step for one in parties if isinstance(one, Party)]

    ends = asyncio.run(all_of_it())
    assert isinstance(ends.pop("agent-0"), Killed)
    assert set(ends.values()) == {None}
    first, second, third = steps()
    assert first + 1 == second == third
    assert set(asyncio.run(all_of_it()).values()) == {None}
    assert steps() == [second] * AGENTS
