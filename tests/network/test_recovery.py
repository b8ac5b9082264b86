"""A party's files: a step is complete or absent; a changed file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_team import packed_episodes

from pevdn.errors import PevdnError
from pevdn.network.recovery import Journal, Outcome, read_sealed, write_sealed


def outcome(step: int) -> Outcome:
    words = np.arange(step, 2 * step, dtype=np.uint32) * np.uint32(0x9E3779B1)
    return Outcome(step, "update", words, {"alice": bytes([step]) * 32})


def assert_equal(found: list[Outcome], steps: range) -> None:
    assert [one.step for one in found] == list(steps)
    for one in found:
        assert one.kind == "update" and one.nonces == outcome(one.step).nonces
        assert np.array_equal(one.words, outcome(one.step).words)


def begun(folder: Path, steps: int = 3) -> Journal:
    journal = Journal(folder)
    journal.save(0, {"a": np.arange(3.0)}, {"some": "facts"})
    for step in range(1, steps + 1):
        journal.append(outcome(step))
    return journal


# --- steps -----------------------------------------------------------------------------------


def test_a_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    begun(tmp_path)
    found = Journal(tmp_path).load()
    assert found is not None
    arrays, facts, outcomes = found
    assert list(arrays) == ["a"] and np.array_equal(arrays["a"], np.arange(3.0))
    assert facts == {"some": "facts"}
    assert_equal(outcomes, range(1, 4))


def test_a_new_folder_has_no_journal(tmp_path: Path) -> None:
    assert Journal(tmp_path).load() is None
    assert Journal(tmp_path).read_block(0) is None


@pytest.mark.parametrize("half", [b"{", b'{"step": 4, "kind": "upd', b"\0\0\0\0"])
def test_a_last_line_half_written_was_never_acted_upon(half: bytes, tmp_path: Path) -> None:
    begun(tmp_path)
    with (tmp_path / "journal-0.jsonl").open("ab") as file:
        file.write(half)
    journal = Journal(tmp_path)
    found = journal.load()
    assert found is not None
    assert_equal(found[2], range(1, 4))
    journal.append(outcome(4))  # goes on behind the last whole line
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
        *((line, change) for line in (1, 2, 3) for change in ("words", "step", "junk")),
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
    elif change == "step":
        lines[line - 1] = json.dumps({**fields, "step": 9})
    elif change == "junk":
        lines[line - 1] = "[]"
    elif change == "drop":
        del lines[line - 1]
    else:
        lines[line - 1], lines[line] = lines[line], lines[line - 1]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(PevdnError, match=f"line {line} of .*journal-0.jsonl is damaged; restore"):
        Journal(tmp_path).load()


# --- snapshots -------------------------------------------------------------------------------


def test_two_snapshots_are_kept_and_the_journal_goes_on_from_the_newest(tmp_path: Path) -> None:
    journal = begun(tmp_path, steps=2)
    for at in (2, 4, 6):
        journal.save(at, {"a": np.array(at)}, {})
        journal.append(outcome(at + 1))
        journal.append(outcome(at + 2))
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
    journal.write_block(5, packed_episodes(3, 1, 2), bytes(32))
    found = Journal(tmp_path).read_block(5)
    assert found is not None
    assert found.rows == packed_episodes(3, 1, 2).rows
    assert np.array_equal(found.length, packed_episodes(3, 1, 2).length)
    assert journal.read_block(4) is None


def test_damaged_episodes_are_refused(tmp_path: Path) -> None:
    Journal(tmp_path).write_block(0, packed_episodes(3), bytes(32))
    path = tmp_path / "episodes-0.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PevdnError, match=r"episodes-0.bin is damaged"):
        Journal(tmp_path).read_block(0)


def test_episodes_before_a_block_are_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for block in (8, 9, 10, 11):
        journal.write_block(block, packed_episodes(1), bytes(32))
    journal.delete_blocks_before(10)
    assert [journal.read_block(n) is None for n in (8, 9, 10, 11)] == [True, True, False, False]
