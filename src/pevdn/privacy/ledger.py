"""The ledger of a run: every update is recorded before it is made.

`ledger.jsonl` is an append-only checksum chain (`pevdn.storage.chain`). Each line is on the disk
before the program continues, and moves the ledger from one state to the next:

    line     from → to           records
    open     – → idle            format version, mechanism, planned exposure, identity of the run
    reserve  any → reserved      an upper bound on the updates of the chunk about to be computed
    settle   reserved → idle     the updates made, the exposure after them, a digest of the result,
                                 and the line of the settlement that it repeats, if any
    void     reserved → idle     the world failed before the chunk made an update
    renew    any → same          new random numbers from the state of line `after` on
    copied   any → same          the run continues in a copy of its directory
    opening  any → same          a digest of what a party enters into the opening of a step
    salt     any → same          new random numbers of a party for all steps after `after`

- *Chunk*: iterations of the compiled program between a `reserve` and its `settle`.
- *Lineage*: the settle and renew lines that lead from the start to the current end of the run.
  A repetition is not part of it: it reaches a state that the lineage already contains.
- *Position*: the last entry of the lineage that a state contains; a checkpoint stores it.
- *Pending*: the entries of the lineage after the position, following a restart. Settled chunks are
  computed again, from the same state with the same random numbers, and renewals are applied
  again, each in its place. A repetition with an equal digest releases nothing new and adds nothing
  to ε. With a different digest the same noise would hide two different gradients: it is refused.
- *Lost*: updates that were made, or may have been made, and are not in the lineage: chunks that a
  renewal discarded, and reservations without settlement, in full. They count for every episode on
  top of the exposure in the lineage.

*Openings* of pe-vdn-d. A record is opened at n ages that are fixed in advance, by iterations after
it is stored, so at most n times along any path of states, and at most once in an iteration. All
states that were ever reached form a tree; what is lost are paths that branch off: the chunks that
one renewal discards follow each other, and so do the iterations of a reservation without
settlement. A record is stored in one of these paths or in the lineage, which opens it at most n
times. A path that branches off later finds it stored already, and opens it again at later ages
only: at most n − 1 times, and at most once in an iteration. So no record is opened more than
n + Σ min(iterations lost, n − 1) times, over all lost paths; with n = 1 nothing is added. Chunks
are reserved with the openings inside them. A party instead books each opening in a line of its
own, and never enters two versions of one (`book_opening`): no record is opened more than n times.

All counts follow from the lines alone. A crash may over-count, never under-count.

`ledger.head` holds the number and checksum of the last line and so reveals missing lines.
Checksums detect damage and mix-ups, not an adversary who can rewrite every file of the run.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pevdn.errors import PevdnError, UsageError
from pevdn.privacy.accounting import Mechanism, Spent
from pevdn.storage import chain
from pevdn.storage.chain import Line
from pevdn.storage.files import sync_directory, write_atomically

FILE, HEAD = "ledger.jsonl", "ledger.head"
VERSION = 2  # of the lines; version 1 did not write its number
OPENING = b'{"line": 1, "kind": "open"'


class Chunk(NamedTuple):
    """Iterations of the compiled program between two lines of the ledger."""

    until: int  # largest number of environment steps it may reach
    iterations: int  # largest number it may make
    limit: list[int]  # largest exposure it may reach, by seed
    made: list[int]  # updates by seed, for a repetition
    digest: str  # of the result, for a repetition
    devices: int = 1  # that share the seeds; rounding differs between numbers of devices
    openings: int = 0  # largest number of openings of one record in it


class Ledger:
    """The ledger of one run. Numbers by seed are lists."""

    def __init__(self, folder: Path, lines: Sequence[Line]) -> None:
        self.folder = folder
        self.lines: list[Line] = []
        self._lineage: list[Line] = []
        self._at = 0  # entries of the lineage that the current state contains
        self._reserved = 0  # updates of the open reservation
        self._crashed = 0  # updates of reservations that were never settled
        self._booked = 0  # openings of one record, if it was in all that were booked
        self._opening = 0  # openings of one record in the open reservation
        self._lost_openings = 0  # of one record, in paths that branch off the lineage
        self._entered: dict[int, str] = {}  # digests of a party's openings, by step of the protocol
        self._salts: list[tuple[int, str]] = []  # of a party: for steps after the first, in order
        for line in lines:
            self._apply(line)

    def _apply(self, line: Line) -> None:
        """Make the state transition of one line."""
        self.lines.append(line)
        match line["kind"]:
            case "open":
                self._zeros = [0] * self.seeds
                self._computed = self._zeros  # updates of all settlements
                self._discarded = self._zeros  # of those that a renewal took out of the lineage
            case "reserve":
                self._crashed += self._reserved
                self._reserved = line["updates"]
                self._lost_openings += self._opened_again(self._opening)
                self._opening = line.get("openings", 0)
                self._booked += self._opening
            case "void":
                self._reserved = self._opening = 0
            case "settle":
                self._reserved = self._opening = 0
                self._computed = _plus(self._computed, line["made"])
                if line["repeats"] is None:
                    self._lineage.append(line)
            case "renew":
                discarded = 0  # openings of one record
                while self._lineage and self._lineage[-1]["line"] > line["after"]:
                    entry = self._lineage.pop()
                    self._discarded = _plus(self._discarded, entry.get("made", self._zeros))
                    discarded += entry.get("openings", 0)
                self._lost_openings += self._opened_again(discarded)
                self._lineage.append(line)
            case "opening":
                self._entered[line["step"]] = line["digest"]
                self._booked += 1
            case "salt":
                self._salts.append((line["after"], line["nonce"]))

    def _opened_again(self, openings: int) -> int:
        """The openings on a lost path of a record that was stored, and so opened, before it."""
        return min(openings, max(0, self.mechanism.openings - 1))

    # ---- open, read and resume ------------------------------------------------------------

    @classmethod
    def begin(
        cls,
        folder: Path,
        run: str,
        mechanism: Mechanism,
        seeds: int,
        planned: int,
        affordable: int | None = None,
        randomness: str = "seed",
        budget: tuple[float, str] | None = None,
    ) -> Ledger:
        """Write a new ledger; its `open` line is on the disk when this returns.

        `planned` is the largest exposure that the settings allow, `affordable` the largest that
        the run's `budget` of ε for an observer allows, if it has one; `randomness` names the
        source of the noise. A ledger with more than an `open` line is never replaced.
        """
        path = folder / FILE
        if cls.begun(folder):
            raise PevdnError(
                f"{path} counts updates of a training, so no other training may begin in its "
                f"directory; restore the missing files of {folder}, or train in another one."
            )
        (folder / HEAD).unlink(missing_ok=True)
        path.write_text("")
        ledger = cls(folder, [])
        facts: Line = {"version": VERSION, "run": run, "nonce": secrets.token_hex(8)}
        facts |= {"seeds": seeds, "randomness": randomness, "mechanism": mechanism._asdict()}
        facts |= {"planned": planned, "affordable": affordable, "budget": budget}
        facts |= {"inode": path.stat().st_ino}
        ledger._append("open", **facts)
        sync_directory(folder)
        return ledger

    @staticmethod
    def begun(folder: Path) -> bool:
        """Return whether the folder holds more of a ledger than a part of an `open` line.

        Only a crash before the first reservation leaves less.
        """
        path = folder / FILE
        text = path.read_bytes() if path.exists() else b""
        first, _, more = text.partition(b"\n")
        return bool(more) or first[: len(OPENING)] != OPENING[: len(first)]

    @classmethod
    def read(cls, folder: Path, run: str) -> Ledger:
        """Read and verify the ledger of a run. An incomplete last line was never acted upon."""
        path, head = folder / FILE, folder / HEAD
        try:
            last = _parse_head(head.read_bytes())  # first: the run may be appending lines
            lines = chain.read(path)
        except OSError as problem:
            raise PevdnError(
                f"{problem.filename} cannot be read, and without it the ε of this run is unknown; "
                "restore it, or train anew."
            ) from None
        except chain.BrokenChain as problem:
            raise _refused(path, f"line {problem.number} was changed or removed") from None
        if last is None or last["line"] < 1:
            raise _refused(head, "it is damaged")
        if len(lines) < last["line"]:
            raise _refused(path, f"it is truncated to {len(lines)} of {last['line']} lines")
        if lines[last["line"] - 1]["check"] != last["check"]:
            raise _refused(path, f"line {last['line']} does not match {HEAD}")
        version = lines[0].get("version", 1)
        if version < VERSION:
            raise PevdnError(
                f"{path} is from an older version of pevdn, whose count can be too low after a "
                'kill and whose noise ended at 5.3 standard deviations (docs/privacy.md, "What '
                'reviewers found"); train anew. `pevdn evaluate` and `pevdn replay` still work.'
            )
        if version > VERSION:
            raise PevdnError(
                f"{path} has format version {version}, but this pevdn reads {VERSION}; use the "
                "version of pevdn that wrote it, or a newer one."
            )
        if lines[0]["run"] != run:
            raise _refused(path, "it belongs to a run with another configuration")
        return cls(folder, lines)

    def go_on(self, line: int, check: str) -> None:
        """Continue from a checkpoint with this position; later entries become pending."""
        if line > len(self.lines) or (line and self.lines[line - 1]["check"] != check):
            raise _refused(self.folder / FILE, "it lacks the line that the checkpoint refers to")
        numbers = [0, *(x["line"] for x in self._lineage)]
        if line not in numbers:
            raise PevdnError(
                f"the newest checkpoint in {self.folder} holds updates that `pevdn resume "
                "--new-noise` discarded; delete that checkpoint to fall back on an older one, or "
                "train anew."
            )
        self._at = numbers.index(line)
        chain.cut_incomplete_line(self.folder / FILE)

    @property
    def position(self) -> tuple[int, str]:
        """Return number and checksum of the last lineage entry that the current state contains."""
        if self._at == 0:
            return 0, ""
        entry = self._lineage[self._at - 1]
        return int(entry["line"]), str(entry["check"])

    def renew(self) -> None:
        """Discard what is pending: its updates are lost. Call `take_renewal` next."""
        after, _ = self.position
        self._append("renew", after=after, nonce=secrets.token_hex(16))

    def take_renewal(self) -> str | None:
        """Return the nonce of the next pending entry and pass it if it is a renewal, else None.

        The caller must derive new random keys from the nonce before the next reservation.
        """
        entry = self._pending
        if entry is None or entry["kind"] != "renew":
            return None
        self._at += 1
        return str(entry["nonce"])

    @property
    def up_to_date(self) -> bool:
        """Return whether the current state contains the whole lineage: nothing is pending."""
        return self._pending is None

    @property
    def nonce(self) -> str:
        """Return the unique identifier of this ledger."""
        return str(self.lines[0]["nonce"])

    @property
    def _pending(self) -> Line | None:
        """The first entry of the lineage that the current state does not contain."""
        return self._lineage[self._at] if self._at < len(self._lineage) else None

    def note_copy(self) -> bool:
        """Return whether the file is a copy of the one last recorded, and record it if so."""
        inode = (self.folder / FILE).stat().st_ino
        if inode == [x for x in self.lines if "inode" in x][-1]["inode"]:
            return False
        self._append("copied", inode=inode)
        return True

    # ---- spend ----------------------------------------------------------------------------

    def reserve(
        self,
        until: int,
        iterations: int,
        limit: Sequence[int],
        updates_each: int,
        devices: int = 1,
        openings_each: int = 0,
    ) -> Chunk:
        """Record a chunk before it is computed, and return its limits.

        These are the requested ones, or those of the pending chunk that is to be repeated. An
        iteration makes up to `updates_each` updates, and opens a record up to `openings_each`
        times.
        """
        entry = self._pending
        chunk = Chunk(until, iterations, list(limit), [], "", devices, iterations * openings_each)
        if entry is not None:
            assert entry["kind"] == "settle", "call take_renewal before reserve"
            chunk = Chunk(**{name: entry[name] for name in Chunk._fields if name in entry})
        if chunk.until != until:
            raise _refused(self.folder / FILE, "its chunks do not match this run")
        if chunk.devices != devices:
            raise UsageError(
                f"updates lost in a crash were made with --devices {chunk.devices} and may differ "
                f"with --devices {devices}; continue with `pevdn resume {self.folder} --devices "
                f"{chunk.devices}`, or with --new-noise, which draws new random numbers and counts "
                "the lost updates as spent."
            )
        facts = {"updates": chunk.iterations * updates_each, "openings": chunk.openings}
        self._append("reserve", **facts, repeats=_number_of(entry))
        return chunk

    def settle(
        self, chunk: Chunk, made: Sequence[int], exposure: Sequence[int], digest: str
    ) -> None:
        """Record a computed chunk before its result is used."""
        entry = self._pending
        if entry is not None and entry["digest"] != digest:
            raise PevdnError(
                "updates lost in a crash gave a different result when repeated, so the same noise "
                "would hide two different gradients; continue with `pevdn resume "
                f"{self.folder} --new-noise`, which draws new random numbers and counts the lost "
                "updates as spent."
            )
        done = chunk._replace(made=list(made), digest=digest)
        self._append("settle", **done._asdict(), exposure=list(exposure), repeats=_number_of(entry))
        self._at += 1  # only now: if writing the line fails the caller keeps the old state

    def new_salt(self, completed: int) -> None:
        """Let a party draw new random numbers after a restart, for all steps that it did not begin.

        `completed` is its last step. A copy or a backup that goes on plays other episodes; under
        the same noise their difference would show. A step whose opening is booked keeps its salt.
        """
        after = max(completed, *self._entered, 0)
        self._append("salt", after=after, nonce=secrets.token_hex(16))

    def salt(self, step: int) -> str:
        """Return what a party's random numbers of a step depend on, beside its secret."""
        later = [nonce for after, nonce in self._salts if after < step]
        return later[-1] if later else self.nonce

    def void(self) -> None:
        """Cancel the reservation: the chunk made no update."""
        self._append("void")

    def book_opening(self, step: int, digest: str) -> None:
        """Record what a party enters into an opening, before it sends the first share.

        `step` is that of the protocol, and `digest` is over the messages with their noise. A step
        is booked once: entering the same again reveals nothing new, and anything else is refused.
        """
        if step not in self._entered:
            self._append("opening", step=step, digest=digest)
        elif self._entered[step] != digest:
            raise PevdnError(
                f"step {step} was to open other messages than {self.folder / FILE} has booked for "
                "it, so two noisy versions of the same records would be revealed; restore the "
                "whole directory, or restart the whole team."
            )

    # ---- report ---------------------------------------------------------------------------

    @property
    def seeds(self) -> int:
        return int(self.lines[0]["seeds"])

    @property
    def mechanism(self) -> Mechanism:
        return Mechanism(**self.lines[0]["mechanism"])

    @property
    def lineage(self) -> list[Line]:
        """Return the settle and renew lines from the start to the current end of the run."""
        return list(self._lineage)

    @property
    def lost(self) -> list[int]:
        """Return the lost updates by seed: made, or possibly made, and not in the lineage."""
        return [n + self._crashed + self._reserved for n in self._discarded]

    @property
    def counted(self) -> list[int]:
        """Return all updates ever computed, with repetitions and unsettled reservations."""
        return [n + self._crashed + self._reserved for n in self._computed]

    @property
    def exposure(self) -> list[int]:
        """Return the exposure of the most exposed episode so far, including all lost updates."""
        return _plus(self._exposure, self.lost)

    @property
    def bound(self) -> list[int]:
        """Return the largest exposure that the run can end with if no more updates are lost.

        It does not depend on the results, so it also holds for a run that is stopped because of
        them.
        """
        planned, affordable = self.lines[0]["planned"], self.affordable
        bounds = []
        for reached, lost in zip(self._exposure, self.lost, strict=True):
            most = planned if affordable is None else min(planned, affordable - lost)
            bounds.append(max(most, reached) + lost)
        return bounds

    @property
    def affordable(self) -> int | None:
        """Return the largest exposure that the budget allows, given the openings that were lost."""
        first = self.lines[0]["affordable"]
        if first is None or not self.lost_openings:
            return None if first is None else int(first)
        epsilon, observer = self.lines[0]["budget"]
        return self.mechanism.affordable(epsilon, observer, int(first), self.openings_bound)

    @property
    def openings(self) -> int:
        """Return the openings of the most opened record so far, including all that may be lost."""
        return min(self.mechanism.openings, self._booked) + self.lost_openings

    @property
    def openings_bound(self) -> int:
        """Return the most openings that a record can end with if no more chunks are lost."""
        return self.mechanism.openings + self.lost_openings

    @property
    def lost_openings(self) -> int:
        """Return the openings of one record that were made, or may have been, on lost paths."""
        return self._lost_openings + self._opened_again(self._opening)

    def spent(self) -> list[Spent]:
        """Return ε of the exposure so far, by seed: for a run that continues whatever it shows."""
        return [self.mechanism.spent(n, self.openings) for n in self.exposure]

    def guaranteed(self) -> list[Spent]:
        """Return ε of the bound, by seed: for a run that may stop at any time, for any reason."""
        return [self.mechanism.spent(n, self.openings_bound) for n in self.bound]

    def coalition(self) -> list[float]:
        """Return ε of the bound for a coalition and a whole episode of all other agents, by seed.

        There is none without noised openings.
        """
        of = partial(self.mechanism.epsilon, observer="coalition", openings=self.openings_bound)
        return [of(n) for n in self.bound] if self.mechanism.noised else []

    @property
    def _exposure(self) -> list[int]:
        """The exposure of the most exposed episode, in the lineage alone."""
        newest_first = (x["exposure"] for x in reversed(self._lineage) if x["kind"] == "settle")
        return list(next(newest_first, self._zeros))

    # ---- write ----------------------------------------------------------------------------

    def _append(self, kind: str, **facts: Any) -> None:
        before = self.lines[-1]["check"] if self.lines else ""
        line = {"line": len(self.lines) + 1, "kind": kind, **facts}
        self._apply(line := chain.extend(self.folder / FILE, before, line))
        write_atomically(self.folder / HEAD, json.dumps({k: line[k] for k in ("line", "check")}))


def digest(arrays: Iterable[Any]) -> str:
    """Return a digest of the contents of arrays, in order."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:32]


def _number_of(entry: Line | None) -> int | None:
    return None if entry is None else int(entry["line"])


def _plus(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _parse_head(text: bytes) -> Line | None:
    """Return number and checksum of the last line; None if the head is damaged."""
    try:
        head = json.loads(text)
        return {**head, "line": int(head["line"]), "check": str(head["check"])}
    except (ValueError, KeyError, TypeError):
        return None


def _refused(path: Path, reason: str) -> PevdnError:
    return PevdnError(
        f"{path} cannot be relied on: {reason}; restore the whole run from a backup, or train anew."
    )
