"""The ledger by itself: a crash may over-count, never under-count, and damage is detected."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    content,
)

from pevdn.errors import PevdnError
from pevdn.privacy import ledger as ledgers
from pevdn.privacy.accounting import Mechanism
from pevdn.privacy.ledger import FILE, HEAD, Ledger

MECHANISM = Mechanism(1 / 8, 1.0, 2, 1e-2)
ID = "this run"
PLANNED = 40


def spend(ledger: Ledger, made: int, iterations: int = 3, digest: str = "d") -> None:
    """Spend one chunk with at most one update per iteration, for a run of one seed."""
    chunk = ledger.reserve(100, iterations, [99], 1)
    ledger.settle(chunk, [made], [ledger._exposure[0] + made], digest)


@given(
    st.lists(
        st.tuples(st.sampled_from(["settled", "crashed", "saved"]), st.integers(0, 5)), max_size=12
    )
)
def test_whatever_crashes_the_ledger_counts_every_update(tmp_path_factory, events):
    """Chunks are settled, or cut short by a crash after which the process starts over."""
    folder = tmp_path_factory.mktemp("book")
    ledger = Ledger.begin(folder, ID, MECHANISM, 1, PLANNED)
    checkpoint, applied, surviving = ledger.position, 0, []
    for what, made in events:
        if what == "saved":
            checkpoint, surviving = ledger.position, []
            continue
        chunk = ledger.reserve(100, 5, [99], 1)
        applied += made  # the machine made these updates, settled or not
        if what == "settled":
            ledger.settle(chunk, [made], [made], f"digest {len(surviving)}")
            surviving.append(made)
            continue
        ledger = Ledger.read(folder, ID)
        ledger.go_on(*checkpoint)
        for number, again in enumerate(surviving):
            chunk = ledger.reserve(100, 1, [99], 1)
            assert chunk.iterations == 5  # of the repeated chunk, not of the request
            applied += again
            ledger.settle(chunk, [again], [again], f"digest {number}")
    assert ledger.counted[0] >= applied
    assert Ledger.read(folder, ID).counted[0] >= applied


def test_a_crash_counts_all_that_was_reserved_for_every_episode(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    before = ledger.exposure
    ledger.reserve(100, 7, [99], 2)
    found = Ledger.read(tmp_path, ID)
    assert found.lost == [14]
    assert found.exposure == [before[0] + 14]
    assert found.spent() == [MECHANISM.spent(before[0] + 14)]


def test_a_repeated_chunk_adds_to_the_count_and_not_to_epsilon(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    start = ledger.position
    spend(ledger, made=2)
    exposure = ledger.exposure
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*start)
    chunk = ledger.reserve(100, 9, [99], 1)
    ledger.settle(chunk, [2], exposure, "d")
    assert ledger.counted == [4]
    assert ledger.exposure == exposure
    assert ledger.lost == [0]


def test_a_repetition_that_comes_out_differently_is_refused(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    start = ledger.position
    spend(ledger, made=2)
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*start)
    chunk = ledger.reserve(100, 9, [99], 1)
    with pytest.raises(PevdnError, match="same noise would hide two different gradients"):
        ledger.settle(chunk, [2], [2], "another digest")

    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*start)
    ledger.renew()
    nonce = ledger.take_renewal()
    assert nonce is not None and ledger.take_renewal() is None
    assert ledger.lost == [2 + 3]  # the settled chunk, and the reservation of the repetition
    spend(ledger, made=1, digest="new")
    again = Ledger.read(tmp_path, ID)
    again.go_on(*start)
    assert again.take_renewal() == nonce
    assert again.reserve(100, 9, [99], 1).digest == "new"


def test_a_position_stays_where_it_is_until_a_repetition_is_settled(tmp_path):
    """A checkpoint during repetitions must keep the remaining ones pending."""
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    positions = [ledger.position]
    for number in range(3):
        spend(ledger, made=number + 1, digest=str(number))
        positions.append(ledger.position)
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*positions[0])
    for number in range(2):
        assert ledger.position == positions[number]
        chunk = ledger.reserve(100, 9, [99], 1)
        assert ledger.position == positions[number]
        ledger.settle(chunk, [number + 1], [0], str(number))
    assert ledger.position == positions[2]
    repeats = [x["repeats"] for x in ledger.lines if x["kind"] == "settle"]
    assert repeats == [None, None, None, positions[1][0], positions[2][0]]
    ledger.renew()
    assert ledger.lost == [3] and Ledger.read(tmp_path, ID).lost == [3]


def test_a_renewal_is_applied_again_in_its_place(tmp_path):
    """Checkpoint A, chunk, checkpoint B, chunk, crash, renewal from B, chunk; then B is lost."""
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    a = ledger.position
    spend(ledger, made=1, digest="from A to B")
    b = ledger.position
    spend(ledger, made=2, digest="lost")
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*b)
    ledger.renew()
    nonce = ledger.take_renewal()
    spend(ledger, made=3, digest="after B")

    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*a)
    assert ledger.take_renewal() is None
    chunk = ledger.reserve(100, 9, [99], 1)
    ledger.settle(chunk, [1], [1], "from A to B")
    assert ledger.take_renewal() == nonce
    chunk = ledger.reserve(100, 9, [99], 1)
    ledger.settle(chunk, [3], [4], "after B")
    assert ledger.lost == [2]
    ledger.go_on(*a)
    ledger.renew()  # instead of repeating
    assert ledger.lost == [1 + 2 + 3]


def test_a_second_renewal_gives_up_the_first_with_other_random_numbers(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    nonces = set()
    for life in range(3):  # a crash right after the line of the renewal
        ledger.go_on(0, "")
        ledger.renew()
        nonces.add(Ledger.read(tmp_path, ID).lineage[-1]["nonce"])
        assert len(ledger.lineage) == 1 and len(nonces) == life + 1
    nonce = ledger.take_renewal()
    spend(ledger, made=2)
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(0, "")
    assert ledger.take_renewal() == nonce
    assert ledger.lost == [0]


def test_a_checkpoint_of_a_state_that_was_given_up_is_refused(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    given_up = ledger.position
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(0, "")
    ledger.renew()
    with pytest.raises(PevdnError, match="--new-noise` discarded; delete that checkpoint"):
        Ledger.read(tmp_path, ID).go_on(*given_up)


def test_a_reservation_that_made_nothing_is_void(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    ledger.reserve(100, 1, [99], 2)
    assert ledger.lost == [2]
    ledger.void()
    assert ledger.lost == ledger.counted == Ledger.read(tmp_path, ID).lost == [0]
    assert ledger.position == (0, "")


def test_a_state_is_not_past_a_line_that_could_not_be_written_in_full(tmp_path, monkeypatch):
    """The settlement is on the disk, its head is not: the caller keeps the old state."""
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    chunk = ledger.reserve(100, 3, [99], 1)
    with monkeypatch.context() as patch:
        patch.setattr(ledgers, "write_atomically", failing)
        with pytest.raises(OSError, match="No space"):
            ledger.settle(chunk, [2], [2], "d")
    assert ledger.position == (0, "")
    assert Ledger.read(tmp_path, ID).lost == [0]
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(0, "")
    assert ledger.reserve(100, 9, [99], 1).digest == "d"


def failing(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- a ledger is never replaced ----------------------------------------------------------------


def test_a_ledger_with_a_reservation_is_never_begun_anew(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    ledger.reserve(100, 7, [99], 1)
    for missing in ([], [HEAD]):
        for name in missing:
            (tmp_path / name).unlink()
        before = content(tmp_path)
        with pytest.raises(PevdnError, match="no other training may begin"):
            Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
        assert content(tmp_path) == before


def test_what_a_crash_leaves_of_a_beginning_may_be_begun_anew(tmp_path):
    Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    line, head = (tmp_path / FILE).read_bytes(), (tmp_path / HEAD).read_bytes()
    for size in range(len(line) + 1):
        for vouched in (True, False):
            (tmp_path / FILE).write_bytes(line[:size])
            (tmp_path / HEAD).unlink()
            if vouched:
                (tmp_path / HEAD).write_bytes(head)
            assert not Ledger.begun(tmp_path)
            spend(Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED), made=2)
            assert Ledger.read(tmp_path, ID).counted == [2]
    (tmp_path / FILE).write_bytes(b"something else")
    assert Ledger.begun(tmp_path)


# --- files of a ledger that are damaged ----------------------------------------------------------


def test_a_crash_at_any_byte_of_a_line_leaves_a_ledger_that_can_be_read(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    file, head = tmp_path / FILE, tmp_path / HEAD
    before, vouched, counted = file.read_bytes(), head.read_bytes(), ledger.counted
    ledger.reserve(100, 7, [99], 1)
    line = file.read_bytes()[len(before) :]
    for cut in range(len(line) + 1):  # the line is on the disk before its head is
        file.write_bytes(before + line[:cut])
        head.write_bytes(vouched)
        found = Ledger.read(tmp_path, ID)
        complete = cut == len(line)
        assert found.counted == [counted[0] + 7 * complete]
        found.go_on(0, "")
        spend(found, made=2)  # the lost chunk again
        assert Ledger.read(tmp_path, ID).counted == [counted[0] + 7 * complete + 2]


def test_any_change_to_any_byte_is_noticed(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    file = tmp_path / FILE
    good = file.read_bytes()
    for place in range(0, len(good), 7):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(PevdnError, match="cannot be relied on"):
            Ledger.read(tmp_path, ID)
    file.write_bytes(good)
    assert Ledger.read(tmp_path, ID).counted == [2]


def test_a_ledger_cut_short_anywhere_is_noticed(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    file = tmp_path / FILE
    good = file.read_bytes()
    for size in range(0, len(good), 11):
        file.write_bytes(good[:size])
        with pytest.raises(PevdnError, match="is truncated"):
            Ledger.read(tmp_path, ID)


@pytest.mark.parametrize("name", [FILE, HEAD])
def test_a_missing_book_is_named(tmp_path, name):
    spend(Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED), made=2)
    (tmp_path / name).unlink()
    with pytest.raises(PevdnError, match=f"{name} cannot be read"):
        Ledger.read(tmp_path, ID)
