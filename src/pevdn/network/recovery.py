"""What a party has on disk: enough to be killed at any instant.

    snapshot-R.bin   the agent and the public counters after round R
    journal-R.jsonl  a line for every round completed since: what came out of it
    episodes-B.bin   the agent's own episodes of block B

A round is complete once its line is on the disk. What the agent computes from it is the same
every time, so that after a kill the rounds since the snapshot are computed again, from the
agent's own episodes and the sums that were opened, without asking anybody.

Lines are chained by checksums. A last line that is half written was never acted upon.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pevdn.agent.packed_replay import PackedReplay
from pevdn.errors import PevdnError
from pevdn.storage import chain
from pevdn.storage.files import sync_directory, write_atomically


@dataclass(frozen=True)
class Record:
    """What came out of a round."""

    round: int
    kind: str  # play, update or evaluate
    words: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    nonces: Mapping[str, bytes] = field(default_factory=dict)  # who revealed what

    def to_line(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "kind": self.kind,
            "words": base64.b64encode(self.words.astype("<u4").tobytes()).decode(),
            "nonces": {name: nonce.hex() for name, nonce in sorted(self.nonces.items())},
        }

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Record:
        words = np.frombuffer(base64.b64decode(line["words"]), "<u4").astype(np.uint32)
        nonces = {name: bytes.fromhex(nonce) for name, nonce in line["nonces"].items()}
        return cls(line["round"], line["kind"], words, nonces)


class Journal:
    """The files of one party."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._base = 0  # the round of the snapshot that the journal follows
        self._check = ""

    # ---- rounds -----------------------------------------------------------------------------

    def append(self, record: Record) -> None:
        """A round is complete when this returns."""
        self._check = chain.extend(self._path(), self._check, record.to_line())["check"]

    def save(self, round: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """A snapshot after `round`, from which a new journal starts; the one before is kept."""
        text = io.BytesIO()
        packed = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        np.savez(text, facts=packed, **dict[str, Any](arrays))
        write_sealed(self.folder / f"snapshot-{round}.bin", text.getvalue())
        self._base, self._check = round, ""
        self._path().touch()
        for old in self._snapshots()[:-2]:
            (self.folder / f"journal-{old}.jsonl").unlink(missing_ok=True)
            (self.folder / f"snapshot-{old}.bin").unlink()

    def load(self) -> tuple[dict[str, np.ndarray], dict[str, Any], list[Record]] | None:
        """The newest whole snapshot, and the rounds after it; None if nothing was begun."""
        found = self.snapshot()
        return (*found, self._rounds()) if found is not None else None

    def snapshot(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """The newest snapshot; None if nothing was begun."""
        found = self._snapshots()
        if not found:
            return None
        self._base = found[-1]
        payload = read_sealed(self.folder / f"snapshot-{self._base}.bin")
        with np.load(io.BytesIO(payload), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts = json.loads(arrays.pop("facts").tobytes())
        return arrays, facts

    def _rounds(self) -> list[Record]:
        path = self._path()
        if not path.exists():
            return []
        chain.cut_incomplete_line(path)
        try:
            lines = chain.read(path)
        except chain.BrokenChain as problem:
            raise PevdnError(
                f"line {problem.number} of {path} is not what was written; restore the file, or "
                "start the whole team anew in another directory."
            ) from None
        self._check = lines[-1]["check"] if lines else ""
        return [Record.of_line(line) for line in lines]

    def _path(self) -> Path:
        return self.folder / f"journal-{self._base}.jsonl"

    def _snapshots(self) -> list[int]:
        return sorted(int(p.stem.partition("-")[2]) for p in self.folder.glob("snapshot-*.bin"))

    # ---- episodes ---------------------------------------------------------------------------

    def keep(self, block: int, rows: PackedReplay) -> None:
        """A block of own episodes; it is on the disk when this returns."""
        text = io.BytesIO()
        np.save(text, rows.length)
        np.save(text, np.array([len(row) for row in rows.rows]))
        text.write(b"".join(rows.rows))
        write_sealed(self._block(block), text.getvalue())

    def kept(self, block: int) -> PackedReplay | None:
        """A block of own episodes; None if it was never written."""
        if not self._block(block).exists():
            return None
        text = io.BytesIO(read_sealed(self._block(block)))
        length = np.load(text, allow_pickle=False)
        rows = PackedReplay(len(length) - 1)
        rows.length = length
        rows.rows = [text.read(size) for size in np.load(text, allow_pickle=False)]
        return rows

    def drop_before(self, block: int) -> None:
        """Episodes that the buffer did not hold any more when the snapshot was made."""
        for path in self.folder.glob("episodes-*.bin"):
            if int(path.stem.partition("-")[2]) < block:
                path.unlink()

    def _block(self, block: int) -> Path:
        return self.folder / f"episodes-{block}.bin"


def write_sealed(path: Path, payload: bytes) -> None:
    """A file that starts with its checksum; it is on the disk, with its name, after this."""
    write_atomically(path, hashlib.sha256(payload).digest() + payload)
    sync_directory(path.parent)


def read_sealed(path: Path) -> bytes:
    whole = path.read_bytes()
    if hashlib.sha256(whole[32:]).digest() != whole[:32]:
        raise PevdnError(
            f"{path} is damaged; restore it, or start the whole team anew in another directory."
        )
    return whole[32:]
