"""The ledger of a run: every update is recorded before it is made.

`ledger.jsonl` only grows. Every line carries a checksum over itself and the line before, and is on
the disk before the program goes on:

    open      format version, mechanism, planned exposure, and which run this is
    reserve   a chunk of updates is about to be computed: at most so many
    settle    it was computed: how many, the exposure after it, a digest of the result, and the
              line of the settlement that it repeats, if any
    void      the world failed before the chunk made an update: the reservation is cancelled
    renew     new random numbers from the state of line `after` on; later entries are given up
    copied    the run goes on in a copy of its directory

The *lineage* is the list of settle and renew lines that lead from the start to the current end of
the run. Repetitions do not belong to it: they reach a state that it already contains. A checkpoint
stores its *position*, the last entry of the lineage that its state contains. After a restart the
entries behind that position are pending: settled chunks are computed again, from the same state
with the same random numbers, and renewals are applied again, each in its place. If a repeated
chunk has the same digest then nothing new was released and nothing is added to ε. If it does not,
the same noise would hide two different gradients, and the ledger refuses it.

Updates are *lost* if they were made, or may have been made, and are not in the lineage: chunks
that a renewal gave up, and reservations without settlement, in full. They count for every episode
on top of the exposure in the lineage. All this follows from the lines alone. A crash may
over-count, never under-count.

`ledger.head` holds the number and checksum of the last line, which shows that lines are missing.
Checksums detect damage and mix-ups, not an adversary who can rewrite every file of the run.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pevdn.errors import PevdnError, UsageError
from pevdn.privacy.accounting import Mechanism, Spent
from pevdn.storage import chain
from pevdn.storage.chain import Line
from pevdn.storage.files import sync_directory, write_atomically

FILE, HEAD = "ledger.jsonl", "ledger.head"
VERSION = 2  # of the lines; ledgers before the first number have none
OPENING = b'{"line": 1, "kind": "open"'


class Chunk(NamedTuple):
    """Some iterations of the compiled program, between two lines of the ledger."""

    until: int  # environment steps that it may reach
    iterations: int  # that it may make
    limit: list[int]  # the exposure that it may reach, by seed
    made: list[int]  # updates, by seed, if it is to be repeated
    digest: str  # of the result, if it is to be repeated
    devices: int = 1  # that share the seeds; on others, rounding differs


class Ledger:
    """The ledger of one run. Numbers by seed are lists."""

    def __init__(self, folder: Path, lines: Sequence[Line]) -> None:
        self.folder = folder
        self.lines: list[Line] = []
        self._lineage: list[Line] = []
        self._at = 0  # entries of the lineage that the current state contains
        self._reserved = 0  # updates of a reservation that is not settled
        self._crashed = 0  # updates of those that never will be
        for line in lines:
            self._take(line)

    def _take(self, line: Line) -> None:
        """Count one more line."""
        self.lines.append(line)
        kind = line["kind"]
        if kind == "open":
            self._nothing = [0] * self.seeds
            self._computed = self._nothing  # updates in all settlements
            self._given_up = self._nothing  # in those that a renewal took out of the lineage
        elif kind == "reserve":
            self._crashed += self._reserved
            self._reserved = line["updates"]
        elif kind == "void":
            self._reserved = 0
        elif kind == "settle":
            self._reserved = 0
            self._computed = _plus(self._computed, line["made"])
            if line["repeats"] is None:
                self._lineage.append(line)
        elif kind == "renew":
            while self._lineage and self._lineage[-1]["line"] > line["after"]:
                entry = self._lineage.pop()
                self._given_up = _plus(self._given_up, entry.get("made", self._nothing))
            self._lineage.append(line)

    # ---- begin and go on ------------------------------------------------------------------

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
    ) -> Ledger:
        """A new ledger; nothing may be reserved before this returns.

        `planned` is the largest exposure that the settings allow, `affordable` the largest that
        the run's budget allows, if it has one; `randomness` says where the noise comes from. A
        ledger with more than an `open` line is never replaced.
        """
        path = folder / FILE
        if cls.begun(folder):
            raise PevdnError(
                f"{path} counts updates of a training, so no other training may begin in its "
                f"directory; restore the files that {folder} has lost, or train in another one."
            )
        (folder / HEAD).unlink(missing_ok=True)
        path.write_text("")
        ledger = cls(folder, [])
        facts = {"version": VERSION, "run": run, "nonce": secrets.token_hex(8), "seeds": seeds}
        plan = {"mechanism": mechanism._asdict(), "planned": planned, "affordable": affordable}
        facts["randomness"] = randomness
        ledger._append("open", **facts, **plan, inode=path.stat().st_ino)
        sync_directory(folder)
        return ledger

    @staticmethod
    def begun(folder: Path) -> bool:
        """Whether there is a ledger with more than an `open` line, or half of one.

        Only a crash before the first reservation leaves less.
        """
        path = folder / FILE
        text = path.read_bytes() if path.exists() else b""
        first, _, more = text.partition(b"\n")
        return bool(more) or first[: len(OPENING)] != OPENING[: len(first)]

    @classmethod
    def read(cls, folder: Path, run: str) -> Ledger:
        """The ledger of a run, checked. A last line half written was never acted upon."""
        path, head = folder / FILE, folder / HEAD
        try:
            known = _parsed(head.read_bytes())  # first: the run may be writing
            lines = chain.read(path)
        except OSError as problem:
            raise PevdnError(
                f"{problem.filename} cannot be read, and without it nobody knows what this run has "
                "spent; restore it, or train anew."
            ) from None
        except chain.BrokenChain as problem:
            raise _refused(path, f"line {problem.number} is not what was written") from None
        if known is None or known["line"] < 1:
            raise _refused(head, "it is damaged")
        if len(lines) < known["line"]:
            raise _refused(
                path, f"it was cut short: {known['line']} lines were written, {len(lines)} are left"
            )
        if lines[known["line"] - 1]["check"] != known["check"]:
            raise _refused(path, f"it is not the one that {HEAD} vouches for")
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
        """Continue from a checkpoint with this position; what follows it is pending."""
        if line > len(self.lines) or (line and self.lines[line - 1]["check"] != check):
            raise _refused(
                self.folder / FILE, "it does not hold what the checkpoint was saved with"
            )
        numbers = [0, *(x["line"] for x in self._lineage)]
        if line not in numbers:
            raise PevdnError(
                f"the newest checkpoint in {self.folder} holds updates that `pevdn resume "
                "--new-noise` gave up; delete that checkpoint to fall back on an older one, or "
                "train anew."
            )
        self._at = numbers.index(line)
        chain.cut_incomplete_line(self.folder / FILE)

    @property
    def position(self) -> tuple[int, str]:
        """Number and checksum of the last entry of the lineage that the current state contains."""
        if self._at == 0:
            return 0, ""
        entry = self._lineage[self._at - 1]
        return int(entry["line"]), str(entry["check"])

    def renew(self) -> None:
        """Give up what is pending: its updates are lost. `take_renewal` says how to go on."""
        after, _ = self.position
        self._append("renew", after=after, nonce=secrets.token_hex(16))

    def take_renewal(self) -> str | None:
        """The nonce of the renewal that is pending next, if one is; it is then taken as applied.

        The caller has to derive new random keys from it before the next reservation.
        """
        entry = self._pending
        if entry is None or entry["kind"] != "renew":
            return None
        self._at += 1
        return str(entry["nonce"])

    @property
    def up_to_date(self) -> bool:
        """Whether the current state contains the whole lineage: what comes next is new."""
        return self._pending is None

    @property
    def nonce(self) -> str:
        """What no other ledger has."""
        return str(self.lines[0]["nonce"])

    @property
    def _pending(self) -> Line | None:
        """The entry of the lineage that comes after the current state."""
        return self._lineage[self._at] if self._at < len(self._lineage) else None

    def note_copy(self) -> bool:
        """Whether this file is another than the ledger was last written to; recorded if so."""
        here = (self.folder / FILE).stat().st_ino
        if here == [x for x in self.lines if "inode" in x][-1]["inode"]:
            return False
        self._append("copied", inode=here)
        return True

    # ---- spend ----------------------------------------------------------------------------

    def reserve(
        self,
        until: int,
        iterations: int,
        limit: Sequence[int],
        updates_each: int,
        devices: int = 1,
    ) -> Chunk:
        """Before a chunk is computed: what it may do.

        That is what was asked for, or what a pending chunk did.
        """
        entry = self._pending
        chunk = Chunk(until, iterations, list(limit), [], "", devices)
        if entry is not None:
            assert entry["kind"] == "settle", "a renewal is pending, and was not taken"
            chunk = Chunk(*(entry[name] for name in Chunk._fields))
        if chunk.until != until:
            raise _refused(self.folder / FILE, "its chunks are not those of this run")
        if chunk.devices != devices:
            raise UsageError(
                f"updates that were lost in a crash were made with --devices {chunk.devices}, and "
                f"with --devices {devices} they may come out differently; go on with `pevdn resume "
                f"{self.folder} --devices {chunk.devices}`, or with --new-noise, which draws new "
                "random numbers and counts the lost updates as spent."
            )
        self._append("reserve", updates=chunk.iterations * updates_each, repeats=_number(entry))
        return chunk

    def settle(
        self, chunk: Chunk, made: Sequence[int], exposure: Sequence[int], digest: str
    ) -> None:
        """After a chunk was computed, before anybody sees the result."""
        entry = self._pending
        if entry is not None and entry["digest"] != digest:
            raise PevdnError(
                "updates that were lost in a crash came out differently this time, so that the "
                "same noise would hide two different gradients; go on with "
                f"`pevdn resume {self.folder} --new-noise`, which draws new random numbers and "
                "counts the lost updates as spent."
            )
        done = chunk._replace(made=list(made), digest=digest)
        facts = {**done._asdict(), "exposure": list(exposure), "repeats": _number(entry)}
        self._append("settle", **facts)
        self._at += 1  # only now: if the line was not written the state is not used, either

    def void(self) -> None:
        """Instead of settling: no update of the reserved chunk was made."""
        self._append("void")

    # ---- what it says ---------------------------------------------------------------------

    @property
    def seeds(self) -> int:
        return int(self.lines[0]["seeds"])

    @property
    def mechanism(self) -> Mechanism:
        return Mechanism(**self.lines[0]["mechanism"])

    @property
    def lineage(self) -> list[Line]:
        """The settle and renew lines that lead from the start to the current end of the run."""
        return list(self._lineage)

    @property
    def lost(self) -> list[int]:
        """Updates that were made, or may have been, and are not part of the run any more."""
        return [n + self._crashed + self._reserved for n in self._given_up]

    @property
    def counted(self) -> list[int]:
        """All updates ever computed: repetitions, and what a crash may have cut short, too."""
        return [n + self._crashed + self._reserved for n in self._computed]

    @property
    def exposure(self) -> list[int]:
        """Of the most exposed episode so far: in the lineage, and everything that is lost."""
        return _plus(self._exposure, self.lost)

    @property
    def bound(self) -> list[int]:
        """The exposure that the run may have at its end, if no more is lost.

        It does not depend on the results, so it also holds for a run that somebody stops because
        of them.
        """
        planned, affordable = self.lines[0]["planned"], self.lines[0]["affordable"]
        bounds = []
        for reached, lost in zip(self._exposure, self.lost, strict=True):
            most = planned if affordable is None else min(planned, affordable - lost)
            bounds.append(max(most, reached) + lost)
        return bounds

    def spent(self) -> list[Spent]:
        """ε of the exposure so far, by seed: of a run that goes on whatever its results are."""
        return [self.mechanism.spent(n) for n in self.exposure]

    def guaranteed(self) -> list[Spent]:
        """ε of the bound, by seed: of a run that may stop at any time, for any reason."""
        return [self.mechanism.spent(n) for n in self.bound]

    @property
    def _exposure(self) -> list[int]:
        """Of the most exposed episode, in the lineage alone."""
        found = (x["exposure"] for x in reversed(self._lineage) if x["kind"] == "settle")
        return list(next(found, self._nothing))

    # ---- writing --------------------------------------------------------------------------

    def _append(self, kind: str, **facts: Any) -> None:
        before = self.lines[-1]["check"] if self.lines else ""
        line = {"line": len(self.lines) + 1, "kind": kind, **facts}
        self._take(line := chain.extend(self.folder / FILE, before, line))
        write_atomically(self.folder / HEAD, json.dumps({k: line[k] for k in ("line", "check")}))


def digest(arrays: Iterable[Any]) -> str:
    """Return a digest of the contents of arrays, in order."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:32]


def _number(entry: Line | None) -> int | None:
    return None if entry is None else int(entry["line"])


def _plus(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _parsed(text: bytes) -> Line | None:
    """What is known of the last line; None if that is damaged."""
    try:
        found = json.loads(text)
        return {**found, "line": int(found["line"]), "check": str(found["check"])}
    except (ValueError, KeyError, TypeError):
        return None


def _refused(path: Path, reason: str) -> PevdnError:
    return PevdnError(
        f"{path} cannot be relied on: {reason}; restore the whole run from a backup, or train anew."
    )
