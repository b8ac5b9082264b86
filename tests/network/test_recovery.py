"""What a party has on disk: a round is there whole or not at all; what was changed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pevdn.agent.packed_replay import PackedReplay
from pevdn.config import experiment as configuration
from pevdn.errors import PevdnError, UsageError

pytest.importorskip("pevdn.network.transport", reason="the extra is not installed")

from pevdn.network import keys, roster
from pevdn.network.party import Party
from pevdn.network.recovery import Journal, Record, read_sealed, write_sealed
from pevdn.network.roster import Roster

PLACES = [("alice", "127.0.0.1:7701"), ("bob", "127.0.0.1:7702")]  # nobody listens there


def record(round: int) -> Record:
    words = np.arange(round, 2 * round, dtype=np.uint32) * np.uint32(0x9E3779B1)
    return Record(round, "update", words, {"alice": bytes([round]) * 32})


def assert_equal(found: list[Record], rounds: range) -> None:
    assert [r.round for r in found] == list(rounds)
    for one in found:
        assert one.kind == "update" and one.nonces == record(one.round).nonces
        assert np.array_equal(one.words, record(one.round).words)


def begun(folder: Path, rounds: int = 3) -> Journal:
    journal = Journal(folder)
    journal.save(0, {"a": np.arange(3.0)}, {"some": "facts"})
    for round in range(1, rounds + 1):
        journal.append(record(round))
    return journal


def rows(*lengths: int) -> PackedReplay:
    found = PackedReplay(len(lengths))
    found.length[:-1] = lengths
    found.rows = [bytes([n]) * n for n in lengths] + [b""]
    return found


# --- rounds ----------------------------------------------------------------------------------


def test_a_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    begun(tmp_path)
    found = Journal(tmp_path).load()
    assert found is not None
    arrays, facts, records = found
    assert list(arrays) == ["a"] and np.array_equal(arrays["a"], np.arange(3.0))
    assert facts == {"some": "facts"}
    assert_equal(records, range(1, 4))


def test_a_new_folder_has_no_journal(tmp_path: Path) -> None:
    assert Journal(tmp_path).load() is None
    assert Journal(tmp_path).kept(0) is None


@pytest.mark.parametrize("half", [b"{", b'{"round": 4, "kind": "upd', b"\0\0\0\0"])
def test_a_last_line_half_written_was_never_acted_upon(half: bytes, tmp_path: Path) -> None:
    begun(tmp_path)
    with (tmp_path / "journal-0.jsonl").open("ab") as file:
        file.write(half)
    journal = Journal(tmp_path)
    found = journal.load()
    assert found is not None
    assert_equal(found[2], range(1, 4))
    journal.append(record(4))  # goes on behind the last whole line
    again = Journal(tmp_path).load()
    assert again is not None
    assert_equal(again[2], range(1, 5))


def test_wherever_a_journal_is_cut_the_whole_lines_before_are_left(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    begun(folder)
    path = folder / "journal-0.jsonl"
    whole = path.read_bytes()

    @given(st.integers(0, len(whole)))
    def cut(at: int) -> None:
        path.write_bytes(whole[:at])
        found = Journal(folder).load()
        assert found is not None
        assert_equal(found[2], range(1, whole[:at].count(b"\n") + 1))

    cut()


@pytest.mark.parametrize(
    ("line", "change"),
    [
        *((line, change) for line in (1, 2, 3) for change in ("words", "round", "junk")),
        *((line, change) for line in (1, 2) for change in ("drop", "swap")),
    ],
)
def test_a_line_that_was_changed_is_refused(line: int, change: str, tmp_path: Path) -> None:
    begun(tmp_path)
    path = tmp_path / "journal-0.jsonl"
    lines = path.read_text().splitlines()
    fields: dict[str, Any] = json.loads(lines[line - 1])
    if change == "words":
        lines[line - 1] = json.dumps({**fields, "words": "AAAAAA=="})
    elif change == "round":
        lines[line - 1] = json.dumps({**fields, "round": 9})
    elif change == "junk":
        lines[line - 1] = "[]"
    elif change == "drop":
        del lines[line - 1]
    else:
        lines[line - 1], lines[line] = lines[line], lines[line - 1]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(PevdnError, match=f"line {line} of .*journal-0.jsonl is not what was wri"):
        Journal(tmp_path).load()


# --- snapshots -------------------------------------------------------------------------------


def test_two_snapshots_are_kept_and_the_journal_goes_on_from_the_newest(tmp_path: Path) -> None:
    journal = begun(tmp_path, rounds=2)
    for at in (2, 4, 6):
        journal.save(at, {"a": np.array(at)}, {})
        journal.append(record(at + 1))
        journal.append(record(at + 2))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["journal-4.jsonl", "journal-6.jsonl", "snapshot-4.bin", "snapshot-6.bin"]
    found = Journal(tmp_path).load()
    assert found is not None
    assert found[0]["a"] == 6
    assert_equal(found[2], range(7, 9))


@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_damaged_snapshot_is_refused(at: int, tmp_path: Path) -> None:
    begun(tmp_path)
    path = tmp_path / "snapshot-0.bin"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(PevdnError, match=r"snapshot-0.bin is damaged; restore it"):
        Journal(tmp_path).load()


def test_a_snapshot_that_was_under_way_when_the_power_went_is_not_there(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "snapshot-3.new").write_bytes(b"half")
    found = Journal(tmp_path).load()
    assert found is not None
    assert_equal(found[2], range(1, 4))


@given(st.binary(max_size=200), st.integers(0, 10**6))
def test_a_sealed_file_is_read_whole_or_refused(
    tmp_path_factory: pytest.TempPathFactory, payload: bytes, place: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "sealed.bin"
    write_sealed(path, payload)
    assert read_sealed(path) == payload
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(PevdnError, match="is damaged"):
        read_sealed(path)
    path.write_bytes(bytes(data)[: place % 32])
    with pytest.raises(PevdnError, match="is damaged"):
        read_sealed(path)


# --- episodes --------------------------------------------------------------------------------


def test_episodes_come_back_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.keep(5, rows(3, 1, 2))
    found = Journal(tmp_path).kept(5)
    assert found is not None
    assert found.rows == rows(3, 1, 2).rows
    assert np.array_equal(found.length, rows(3, 1, 2).length)
    assert journal.kept(4) is None


def test_damaged_episodes_are_refused(tmp_path: Path) -> None:
    Journal(tmp_path).keep(0, rows(3))
    path = tmp_path / "episodes-0.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PevdnError, match=r"episodes-0.bin is damaged"):
        Journal(tmp_path).kept(0)


def test_episodes_before_a_block_are_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for block in (8, 9, 10, 11):
        journal.keep(block, rows(1))
    journal.drop_before(10)
    assert [journal.kept(n) is None for n in (8, 9, 10, 11)] == [True, True, False, False]


# --- a party's folder ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Roster:
    settings = {
        "hidden_size": 4,
        "buffer_size": 4,
        "expected_batch_size": 4,
        "parallel_episodes": 2,
        "update_every": 2,
        "learning_starts": 4,
    }
    config = configuration.make("pe-vdn-b", "toy:two-step", 1000, 1, 0, settings)
    return keys.create(tmp_path_factory.mktemp("team") / "keys", config, PLACES, "127.0.0.1:7703")


def party(team: Roster, folder: Path) -> Party:
    key = roster.private_key(team.path.parent / "alice.key", team.member("alice"))
    return Party(team, "alice", key, folder)


def played(team: Roster, folder: Path, blocks: int) -> Party:
    """A party that has completed rounds of play, without anybody."""
    alice = party(team, folder)
    alice._score(0.0, 0.0, 2.0)
    alice._save()
    for block in range(blocks):
        alice.journal.keep(block, rows(2, 2))
        nonces = {"alice": bytes(32), "bob": bytes(32)}
        done = Record(alice.course.round + 1, "play", nonces=nonces)
        alice.journal.append(done)
        alice._take_in(done)
    return alice


def test_a_party_goes_on_from_its_folder(team: Roster, tmp_path: Path) -> None:
    alice = played(team, tmp_path, 1)
    again = party(team, tmp_path)
    assert again.course == alice.course and again.course.blocks == 1
    assert again.replay.rows == alice.replay.rows


@pytest.mark.parametrize("saved", [False, True])
def test_episodes_that_are_missing_are_noticed(saved: bool, team: Roster, tmp_path: Path) -> None:
    alice = played(team, tmp_path, 1)
    if saved:
        alice._save()
    (tmp_path / "episodes-0.bin").unlink()
    with pytest.raises(PevdnError, match=r"the episodes of block 0 are not in .* nobody else has"):
        party(team, tmp_path)


def test_episodes_are_kept_as_long_as_a_round_since_the_snapshot_may_need_them(
    team: Roster, tmp_path: Path
) -> None:
    alice = played(team, tmp_path, 3)  # the buffer holds two blocks
    assert alice.journal.kept(0) is not None
    alice._save()
    assert alice.journal.kept(0) is None and alice.journal.kept(1) is not None
    assert party(team, tmp_path).replay.rows == alice.replay.rows


def test_the_folder_of_another_team_is_refused(
    team: Roster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("other") / "keys"
    other = keys.create(out, team.config, PLACES, "127.0.0.1:7703")
    party(team, tmp_path)
    with pytest.raises(UsageError, match="belongs to another team or to other settings"):
        party(other, tmp_path)


@pytest.fixture(scope="module")
def private_team(team: Roster, tmp_path_factory: pytest.TempPathFactory) -> Roster:
    settings = {
        "buffer_size": 8,
        "expected_batch_size": 2,
        "parallel_episodes": 2,
        "update_every": 2,
        "hidden_size": 4,
    }
    config = configuration.make("pe-vdn-c", "toy:two-step", 1000, 1, 0, settings)
    out = tmp_path_factory.mktemp("private") / "keys"
    return keys.create(out, config, PLACES, "127.0.0.1:7703")


def test_a_spent_ledger_without_snapshots_is_never_begun_anew(
    private_team: Roster, tmp_path: Path
) -> None:
    alice = party(private_team, tmp_path)
    assert alice.ledger is not None
    alice.ledger.reserve(1, 1, [99], 1)
    for snapshot in tmp_path.glob("snapshot-*.bin"):
        snapshot.unlink()
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(PevdnError, match=r"no snapshot-\*\.bin, but its ledger counts updates"):
        party(private_team, tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_a_party_killed_while_it_began_begins_anew(private_team: Roster, tmp_path: Path) -> None:
    party(private_team, tmp_path)
    for snapshot in tmp_path.glob("snapshot-*.bin"):
        snapshot.unlink()
    alice = party(private_team, tmp_path)  # nothing but the first line is in the ledger
    assert alice.ledger is not None and len(alice.ledger.lines) == 1


def test_a_snapshot_has_the_position_of_its_state(private_team: Roster, tmp_path: Path) -> None:
    """Lines that follow the last settlement are not part of it."""
    alice = party(private_team, tmp_path)
    ledger = alice.ledger
    assert ledger is not None
    ledger.settle(ledger.reserve(1, 1, [99], 1), [1], [1], "d")
    position = ledger.position
    ledger.reserve(2, 1, [99], 1)
    alice._save()
    found = Journal(tmp_path).snapshot()
    assert found is not None and tuple(found[1]["ledger"]) == position == (3, position[1])


def test_metrics_go_on_behind_the_last_whole_line(team: Roster, tmp_path: Path) -> None:
    alice = party(team, tmp_path)
    alice._score(0.25, 1.0, 2.0)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"seed": 0, "env_st')
    alice._score(0.5, 2.0, 2.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["win_rate"] for line in lines] == [0.25, 0.5]
