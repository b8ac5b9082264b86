"""Openings in the ledger: each is booked before it is made, and counted for one record."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pevdn.errors import PevdnError
from pevdn.privacy.accounting import Mechanism
from pevdn.privacy.ledger import FILE, HEAD, Ledger
from pevdn.storage.chain import checksum

MECHANISM = Mechanism(1 / 8, 1.0, 2, 1e-2)
NOISED = MECHANISM._replace(openings=1, opening_noise=1.0, colluders=1)
ID = "this run"
PLANNED = 40


# --- a party books its openings ------------------------------------------------------------------


def test_an_opening_is_on_the_disk_before_it_is_sent_and_once_only(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    for step in (1, 3):
        ledger.book_opening(step, f"messages of step {step}")
    written = [(x["step"], x["digest"]) for x in Ledger.read(tmp_path, ID).lines[1:]]
    assert written == [(1, "messages of step 1"), (3, "messages of step 3")]
    for again in (ledger, Ledger.read(tmp_path, ID)):  # a round is tried again, a party restarts
        again.book_opening(1, "messages of step 1")
    assert len(Ledger.read(tmp_path, ID).lines) == 3


def test_a_step_never_opens_two_noisy_versions(tmp_path):
    Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED).book_opening(1, "first")
    ledger = Ledger.read(tmp_path, ID)
    with pytest.raises(PevdnError, match="two noisy versions of the same records"):
        ledger.book_opening(1, "second")
    assert len(Ledger.read(tmp_path, ID).lines) == 2
    ledger.book_opening(2, "second")


def test_openings_do_not_move_the_position_of_a_state(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    ledger.book_opening(1, "a")
    chunk = ledger.reserve(2, 1, [99], 1)
    ledger.settle(chunk, [1], [1], "d")
    position = ledger.position
    ledger.book_opening(3, "b")
    assert ledger.position == position
    found = Ledger.read(tmp_path, ID)
    found.go_on(*position)
    assert found.up_to_date and found.exposure == [1] and found.lost == [0]


# --- the openings of the most opened record ------------------------------------------------------


class Model:
    """A training whose iterations store a block and open blocks at n ages, with a real ledger.

    A state is the list of blocks stored so far. `truth` has the transitions in which each block
    was opened: a repetition is the same transition, and reveals nothing new.
    """

    def __init__(self, folder: Path, n: int, blocks: int) -> None:
        self.folder, self.blocks = folder, blocks
        self.ages = [j * blocks // n for j in range(n)]
        self.ledger = Ledger.begin(folder, ID, NOISED._replace(openings=n), 1, PLANNED)
        self.truth: dict[int, set[int]] = defaultdict(set)
        self.settled: dict[int, list[list[int]]] = {}  # states within a chunk, by line
        self.state: list[int] = []
        self.numbers = count()
        self.saved = (self.ledger.position, self.state)

    def chunk(self, iterations: int, settled: bool = True) -> None:
        chunk = self.ledger.reserve(100, iterations, [99], 1, openings_each=1)
        entry = self.ledger._pending
        made = self.settled[entry["line"]] if entry else self.compute(iterations)
        if settled:
            self.ledger.settle(chunk, [len(made)], [0], str(made))
            self.settled.setdefault(self.ledger.position[0], made)
            self.state = made[-1]

    def compute(self, iterations: int) -> list[list[int]]:
        states, state = [], self.state
        for _ in range(iterations):
            transition = next(self.numbers)
            state = [*state, transition]  # a block is numbered by the transition that stored it
            for age in self.ages:
                if age < len(state):
                    self.truth[state[-1 - age]].add(transition)
            states.append(state)
        return states

    def resume(self, new_noise: bool) -> None:
        """Start over from the checkpoint, after a crash or a stop."""
        self.ledger = Ledger.read(self.folder, ID)
        position, self.state = self.saved
        self.ledger.go_on(*position)
        if new_noise:
            self.ledger.renew()
        while self.ledger.take_renewal() is not None:
            pass
        if new_noise:
            self.save()

    def save(self) -> None:
        self.saved = (self.ledger.position, self.state)

    @property
    def most_opened(self) -> int:
        return max((len(of_block) for of_block in self.truth.values()), default=0)


LIVES = st.lists(  # of a process: what it settles before and after a checkpoint, and its end
    st.tuples(
        st.lists(st.integers(1, 3), max_size=3),
        st.lists(st.integers(1, 3), max_size=3),
        st.sampled_from(["crashes in a chunk", "stops"]),
        st.booleans(),
    ),
    max_size=5,
)


@given(st.integers(1, 4), st.integers(4, 6), LIVES)
def test_no_record_is_opened_more_often_than_the_ledger_says(tmp_path_factory, n, blocks, lives):
    model, lossless = Model(tmp_path_factory.mktemp("book"), n, blocks), True
    for saved, unsaved, end, new_noise in lives:
        for iterations in saved:
            model.chunk(iterations)
        model.save()
        for iterations in unsaved:
            model.chunk(iterations)
        if end == "crashes in a chunk":
            model.chunk(2, settled=False)
        lossless &= end == "stops" and not new_noise
        model.resume(new_noise)
        for ledger in (model.ledger, Ledger.read(model.folder, ID)):
            assert model.most_opened <= ledger.openings <= ledger.openings_bound
            assert ledger.openings <= n or (n > 1 and not lossless)


@pytest.mark.parametrize(("n", "lost"), [(1, 0), (2, 1), (3, 2), (4, 3), (64, 5)])
def test_a_path_that_is_lost_opens_a_stored_record_again_at_later_ages_only(tmp_path, n, lost):
    """Five iterations in two chunks are discarded by one renewal."""
    ledger = Ledger.begin(tmp_path, ID, NOISED._replace(openings=n), 1, PLANNED)
    assert ledger.openings == 0 and ledger.openings_bound == n
    for iterations in (2, 3):
        chunk = ledger.reserve(100, iterations, [99], 1, openings_each=1)
        ledger.settle(chunk, [iterations], [iterations], "d")
    assert ledger.openings == min(n, 5) and ledger.lost_openings == 0
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(0, "")
    ledger.renew()
    assert Ledger.read(tmp_path, ID).lost_openings == lost
    assert ledger.openings_bound == n + lost
    assert ledger.guaranteed() == [ledger.mechanism.spent(ledger.bound[0], n + lost)]


def test_a_reservation_counts_its_openings_until_it_is_settled_or_void(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, NOISED._replace(openings=4), 1, PLANNED)
    for end in (lambda c: ledger.settle(c, [0], [0], "d"), lambda _: ledger.void()):
        chunk = ledger.reserve(100, 2, [99], 1, openings_each=1)
        assert Ledger.read(tmp_path, ID).lost_openings == 2
        end(chunk)
        assert ledger.lost_openings == Ledger.read(tmp_path, ID).lost_openings == 0
    ledger.reserve(100, 2, [99], 1, openings_each=1)
    ledger.reserve(100, 9, [99], 1, openings_each=1)  # of the process after a crash
    assert ledger.lost_openings == 2 + 3


def test_a_party_opens_a_record_no_more_than_n_times_whatever_it_loses(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, NOISED._replace(openings=2), 1, PLANNED)
    found = []
    for step in (1, 3, 5):
        ledger.book_opening(step, "a")
        ledger.reserve(step + 1, 1, [99], 1)  # never settled
        found.append(Ledger.read(tmp_path, ID).openings)
    assert found == [1, 2, 2] and ledger.lost == [3] and ledger.openings_bound == 2


def test_what_was_spent_includes_the_openings_so_far(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, NOISED, 1, PLANNED)
    assert ledger.spent()[0].epsilon_record == 0
    ledger.book_opening(1, "a")
    opened = ledger.spent()[0]
    assert opened.epsilon_record > 0 and opened.epsilon_team == opened.epsilon_agent == 0
    assert ledger.guaranteed() == [NOISED.spent(PLANNED)]
    assert ledger.coalition() == [NOISED.epsilon(PLANNED, "coalition")]


def test_lost_openings_leave_room_for_fewer_updates_in_a_budget(tmp_path):
    noised = NOISED._replace(openings=3, opening_noise=4.0)
    allowed = noised.affordable(3.0, "record", 100)
    facts = (noised, 1, 100, allowed, "seed", (3.0, "record"))
    ledger = Ledger.begin(tmp_path, ID, *facts)
    assert ledger.affordable == allowed and ledger.bound == [allowed]
    ledger.reserve(100, 2, [99], 0, openings_each=1)
    assert ledger.openings_bound == 5
    assert 0 < ledger.affordable < allowed and ledger.bound == [ledger.affordable]
    assert ledger.guaranteed()[0].epsilon_record <= 3.0


def test_a_ledger_from_before_noised_openings_is_read_as_it_was(tmp_path):
    """Version 2 had no field about openings; a settlement without one can be repeated."""
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    ledger.settle(ledger.reserve(100, 3, [99], 1), [2], [2], "d")
    lines, before = [], ""
    for line in ledger.lines:
        old = {k: v for k, v in line.items() if k not in ("openings", "budget", "check")}
        if "mechanism" in old:
            old["mechanism"] = dict(list(old["mechanism"].items())[:5])
        before = checksum(before, old)
        lines.append(json.dumps({**old, "check": before}))
    (tmp_path / FILE).write_text("\n".join(lines) + "\n")
    (tmp_path / HEAD).write_text(json.dumps({"line": 3, "check": before}))
    old = Ledger.read(tmp_path, ID)
    assert old.mechanism == MECHANISM and old.spent() == [MECHANISM.spent(2)]
    assert old.spent()[0].epsilon_record is None and old.coalition() == []
    old.go_on(0, "")
    assert old.reserve(100, 9, [99], 1).digest == "d"
