"""Checksum chains: an edited, swapped or removed line is detected, an incomplete one ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pevdn.storage import chain

LINES = [{"n": 1}, {"n": 2, "x": [1.5, None]}, {"n": 3}, {"n": 4}]


def write(path: Path) -> list[chain.Line]:
    before, sealed = "", []
    for line in LINES:
        sealed.append(chain.extend(path, before, line))
        before = sealed[-1]["check"]
    return sealed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "chain.jsonl")
    return tmp_path / "chain.jsonl"


def test_what_was_written_is_read_with_its_checksums(tmp_path: Path) -> None:
    path = tmp_path / "chain.jsonl"
    sealed = write(path)
    assert chain.read(path) == sealed
    assert [{k: v for k, v in x.items() if k != "check"} for x in sealed] == LINES


def test_a_checksum_depends_on_the_line_and_on_the_one_before_and_not_on_key_order() -> None:
    assert chain.checksum("", {"a": 1, "b": 2}) == chain.checksum("", {"b": 2, "a": 1})
    assert chain.checksum("", {"a": 1}) == chain.checksum("", {"a": 1, "check": "its own"})
    assert len({chain.checksum(before, {"a": n}) for before in ("", "x") for n in (1, 2)}) == 4


def edited(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b"1.5", b"2.5"), *lines[2:]]


def swapped(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[2], lines[1], lines[3]]


def removed(lines: list[bytes]) -> list[bytes]:
    return [lines[0], *lines[2:]]


def repeated(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[0], *lines[1:]]


def emptied(lines: list[bytes]) -> list[bytes]:
    return [lines[0], b"\n", *lines[2:]]


def unsealed(lines: list[bytes]) -> list[bytes]:
    return [lines[0], b'{"n": 2}\n', *lines[2:]]


def not_an_object(lines: list[bytes]) -> list[bytes]:
    return [lines[0], b"[2]\n", *lines[2:]]


@pytest.mark.parametrize(
    "damage", [edited, swapped, removed, repeated, emptied, unsealed, not_an_object]
)
def test_a_changed_line_breaks_the_chain_and_is_named(
    path: Path, damage: Callable[[list[bytes]], list[bytes]]
) -> None:
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(chain.BrokenChain) as broken:
        chain.read(path)
    assert broken.value.number == 2


def test_a_line_edited_with_a_new_checksum_breaks_the_chain_at_the_next(path: Path) -> None:
    lines = chain.read(path)
    forged = {**lines[1], "n": 7}
    forged["check"] = chain.checksum(lines[0]["check"], forged)
    path.write_text("".join(json.dumps(x) + "\n" for x in [lines[0], forged, *lines[2:]]))
    with pytest.raises(chain.BrokenChain) as broken:
        chain.read(path)
    assert broken.value.number == 3


@given(st.data())
def test_any_flipped_bit_is_detected_or_changes_no_value(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("chain") / "chain.jsonl"
    sealed = write(path)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 2))  # without the last end of line
    content[place] ^= 1 << data.draw(st.integers(0, 6))
    path.write_bytes(content)
    try:
        assert chain.read(path) == sealed  # white space outside of values
    except chain.BrokenChain:
        return


def test_every_incomplete_last_line_is_ignored_and_can_be_removed(path: Path) -> None:
    whole = path.read_bytes()
    start = whole.rfind(b"\n", 0, -1) + 1
    for size in range(start, len(whole)):
        path.write_bytes(whole[:size])
        assert len(chain.read(path)) == len(LINES) - 1
        chain.cut_incomplete_line(path)
        assert path.read_bytes() == whole[:start]
    last = chain.read(path)[-1]["check"]
    chain.extend(path, last, LINES[-1])
    assert path.read_bytes() == whole


def test_a_complete_file_is_not_cut(path: Path) -> None:
    before = path.read_bytes()
    chain.cut_incomplete_line(path)
    assert path.read_bytes() == before
