"""What a run has spent, written down before it is spent.

`ledger.jsonl` only ever grows. Every line carries a checksum over itself and the line before, and
is on the disk before the program goes on:

    open      the mechanism, and which run this is
    reserve   a chunk of updates is about to be made: so many at most
    settle    it was made: how many, the exposure after it, and a digest of what came out
    renew     lost chunks will not be repeated: new random numbers from here on
    copied    the run goes on in a copy of its directory

A reservation without settlement is the mark of a crash. It counts in full, for every episode, on
top of the exposure: a crash may over-count, never under-count. Chunks that were settled but lost
with the process, because the checkpoint is older, are *repeated*: same state, same random numbers.
Their digests must come out the same. Then nothing new was released and nothing is added to ε; if
not, the same noise would hide two different gradients, which is refused.

`ledger.head` holds the number and checksum of the last line, so that a ledger cut short is noticed.
Checksums show damage and mix-ups, not an adversary who can rewrite every file of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pevdn.errors import PevdnError, UsageError
from pevdn.experiment.directory import write_whole
from pevdn.privacy.accounting import Mechanism, Spent

FILE, HEAD = "ledger.jsonl", "ledger.head"
Line = dict[str, Any]


class Chunk(NamedTuple):
    """Some iterations of the compiled program, between two lines of the ledger."""

    until: int  # environment steps that it may reach
    iterations: int  # that it may make
    limit: list[int]  # the exposure that it may reach, by seed
    made: list[int]  # updates, by seed, if it is to be repeated
    digest: str  # of what came out, if it is to be repeated
    devices: int = 1  # that share the seeds; on others, rounding differs


class Ledger:
    """The ledger of one run. Numbers by seed are lists."""

    def __init__(self, folder: Path, lines: Sequence[Line]) -> None:
        self.folder = folder
        self.lines: list[Line] = []
        self._pending: list[Chunk] = []  # settled, lost with the process, to be repeated
        self._reserved = 0  # updates of a reservation that is not settled
        self._crashed = 0  # updates of those that never will be
        self.renewed = 0  # which renewal the random numbers come from, if after the checkpoint
        for line in lines:
            self._take(line)

    def _take(self, line: Line) -> None:
        """Count one more line."""
        self.lines.append(line)
        kind = line["kind"]
        if kind == "open":
            nothing = [0] * self.seeds
            self._settled, self._given_up, self._exposure = nothing, nothing, nothing
        elif kind == "reserve":
            self._crashed += self._reserved
            self._reserved = line["updates"]
        elif kind == "settle":
            self._reserved = 0
            self._settled = _plus(self._settled, line["made"])
            pairs = zip(self._exposure, line["exposure"], strict=True)
            self._exposure = [max(pair) for pair in pairs]
        elif kind == "renew":
            self._given_up = _plus(self._given_up, line["lost"])

    # ---- begin and go on ------------------------------------------------------------------

    @classmethod
    def begin(cls, folder: Path, run: str, mechanism: Mechanism, seeds: int) -> Ledger:
        """A new ledger; nothing may be reserved before this returns."""
        path = folder / FILE
        path.write_text("")
        ledger = cls(folder, [])
        facts = {"run": run, "nonce": secrets.token_hex(8), "seeds": seeds}
        ledger._append("open", **facts, mechanism=mechanism._asdict(), inode=path.stat().st_ino)
        place = os.open(folder, os.O_RDONLY)
        os.fsync(place)  # that there is a ledger has to survive as well
        os.close(place)
        return ledger

    @staticmethod
    def begun(folder: Path) -> bool:
        """Whether there is a ledger from which something may have been reserved."""
        return (folder / HEAD).exists()

    @classmethod
    def read(cls, folder: Path, run: str) -> Ledger:
        """The ledger of a run, checked. A last line half written was never acted upon."""
        path, head = folder / FILE, folder / HEAD
        try:
            known = _parsed(head.read_bytes())  # first: the run may be writing
            texts = path.read_bytes().split(b"\n")[:-1]
        except OSError as problem:
            raise PevdnError(
                f"{problem.filename} cannot be read, and without it nobody knows what this run has "
                "spent; restore it, or train anew."
            ) from None
        lines: list[Line] = []
        for text in texts:
            line = _parsed(text)
            if line is None or line["check"] != _checksum(lines[-1:], line):
                raise _refused(path, f"line {len(lines) + 1} is not what was written")
            lines.append(line)
        if known is None:
            raise _refused(head, "it is damaged")
        if len(lines) < known["line"]:
            raise _refused(
                path, f"it was cut short: {known['line']} lines were written, {len(lines)} are left"
            )
        if lines[known["line"] - 1]["check"] != known["check"]:
            raise _refused(path, f"it is not the one that {HEAD} vouches for")
        if lines[0]["run"] != run:
            raise _refused(path, "it belongs to a run with another configuration")
        return cls(folder, lines)

    def go_on(self, line: int, check: str) -> None:
        """Continue from a checkpoint saved after `line` lines, of which the last has `check`."""
        if line > len(self.lines) or (line and self.lines[line - 1]["check"] != check):
            raise _refused(
                self.folder / FILE, "it does not hold what the checkpoint was saved with"
            )
        with (self.folder / FILE).open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)  # a last line that is half written
        after = self.lines[line:]
        renewed = [n for n, x in enumerate(after, 1) if x["kind"] == "renew"]
        self.renewed = self._renewals if renewed else 0
        self._pending = [
            Chunk(**{name: x[name] for name in Chunk._fields if name in x})
            for x in after[max(renewed, default=0) :]
            if x["kind"] == "settle" and not x["repeats"]
        ]

    def renew(self) -> None:
        """Give up the chunks that were to be repeated: their updates are spent, and lost."""
        lost = [0] * self.seeds
        for chunk in self._pending:
            lost = _plus(lost, chunk.made)
        self._append("renew", lost=lost)
        self._pending, self.renewed = [], self._renewals

    def note_copy(self) -> bool:
        """Whether this file is another than the ledger was last written to; put down if so."""
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

        That is what was asked for, or again what a chunk did that was lost.
        """
        repeats = bool(self._pending)
        asked = Chunk(until, iterations, list(limit), [], "", devices)
        chunk = self._pending[0] if repeats else asked
        if chunk.until != until:
            raise _refused(self.folder / FILE, "its chunks are not those of this run")
        if chunk.devices != devices:
            raise UsageError(
                f"updates that were lost in a crash were made with --devices {chunk.devices}, and "
                f"with --devices {devices} they may come out differently; go on with `pevdn resume "
                f"{self.folder} --devices {chunk.devices}`, or with --new-noise, which draws new "
                "random numbers and counts the lost updates as spent."
            )
        most = chunk.iterations * updates_each
        self._append("reserve", updates=most, repeats=repeats)
        return chunk

    def settle(
        self, chunk: Chunk, made: Sequence[int], exposure: Sequence[int], digest: str
    ) -> None:
        """After a chunk was computed, before anybody sees what came out."""
        repeats = bool(self._pending)
        if repeats and chunk.digest != digest:
            raise PevdnError(
                "updates that were lost in a crash came out differently this time, so that the "
                "same noise would hide two different gradients; go on with "
                f"`pevdn resume {self.folder} --new-noise`, which draws new random numbers and "
                "counts the lost updates as spent."
            )
        done = chunk._replace(made=list(made), digest=digest)
        self._append("settle", **done._asdict(), exposure=list(exposure), repeats=repeats)
        if repeats:
            self._pending.pop(0)

    # ---- what it says ---------------------------------------------------------------------

    @property
    def seeds(self) -> int:
        return int(self.lines[0]["seeds"])

    @property
    def mechanism(self) -> Mechanism:
        return Mechanism(**self.lines[0]["mechanism"])

    @property
    def head(self) -> tuple[int, str]:
        """Number and checksum of the last line."""
        return len(self.lines), str(self.lines[-1]["check"])

    @property
    def lost(self) -> list[int]:
        """Updates that were made, or may have been, and are not part of the run any more."""
        return [n + self._crashed + self._reserved for n in self._given_up]

    @property
    def counted(self) -> list[int]:
        """All updates ever made, repeated ones too, and those that a crash may have cut short."""
        return [n + self._crashed + self._reserved for n in self._settled]

    @property
    def exposure(self) -> list[int]:
        """Of the most exposed episode: as the program counted it, and everything that is lost."""
        return _plus(self._exposure, self.lost)

    def spent(self) -> list[Spent]:
        return [self.mechanism.spent(n) for n in self.exposure]

    @property
    def _renewals(self) -> int:
        return sum(x["kind"] == "renew" for x in self.lines)

    # ---- writing --------------------------------------------------------------------------

    def _append(self, kind: str, **facts: Any) -> None:
        line = {"line": len(self.lines) + 1, "kind": kind, **facts}
        line["check"] = _checksum(self.lines[-1:], line)
        with (self.folder / FILE).open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(line)
        write_whole(self.folder / HEAD, json.dumps({k: line[k] for k in ("line", "check")}))


def _plus(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _checksum(before: list[Line], line: Line) -> str:
    """Over a line and the checksum of the one before it."""
    text = json.dumps({k: v for k, v in line.items() if k != "check"}, sort_keys=True)
    chain = before[0]["check"] if before else ""
    return hashlib.sha256((chain + text).encode()).hexdigest()


def _parsed(text: bytes) -> Line | None:
    """A line, or what is known of the last one; None if it is neither."""
    try:
        found = json.loads(text)
        return {**found, "line": int(found["line"]), "check": str(found["check"])}
    except (ValueError, KeyError, TypeError):
        return None


def _refused(path: Path, reason: str) -> PevdnError:
    return PevdnError(
        f"{path} cannot be relied on: {reason}; restore the whole run from a backup, or train anew."
    )
