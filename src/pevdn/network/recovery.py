"""A party's files: enough to survive a kill at any instant.

    snapshot-S.bin   the agent and the public counters after step S of the protocol
    journal-S.jsonl  one line per step completed since: its outcome
    episodes-B.bin   the agent's own episodes of block B

A step is complete once its line is on disk. What the agent computes from an outcome is
deterministic, so after a kill it replays the steps since the snapshot from its own episodes and the
opened sums, without asking a peer.

Lines are chained by checksums. An incomplete last line was never acted upon.
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

FACTS = 32  # bytes of the digest before the episodes of a block


@dataclass(frozen=True)
class Outcome:
    """The public outcome of one step of the protocol."""

    step: int
    kind: str  # play, open, update or evaluate
    words: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    nonces: Mapping[str, bytes] = field(default_factory=dict)  # revealed, by party

    def to_line(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "kind": self.kind,
            "words": base64.b64encode(self.words.astype("<u4").tobytes()).decode(),
            "nonces": {name: nonce.hex() for name, nonce in sorted(self.nonces.items())},
        }

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Outcome:
        words = np.frombuffer(base64.b64decode(line["words"]), "<u4").astype(np.uint32)
        nonces = {name: bytes.fromhex(nonce) for name, nonce in line["nonces"].items()}
        return cls(line["step"], line["kind"], words, nonces)


class Journal:
    """The files of one party."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._base = 0  # the step of the snapshot that the journal follows
        self._check = ""

    # ---- steps --------------------------------------------------------------------------------

    def append(self, outcome: Outcome) -> None:
        """Write an outcome; the step is complete when this returns."""
        self._check = chain.extend(self._path(), self._check, outcome.to_line())["check"]

    def save(self, step: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Write a snapshot after `step` and start a new journal; keep the snapshot before it."""
        buffer = io.BytesIO()
        packed = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        np.savez(buffer, facts=packed, **dict[str, Any](arrays))
        write_sealed(self.folder / f"snapshot-{step}.bin", buffer.getvalue())
        self._base, self._check = step, ""
        self._path().touch()
        sync_directory(self.folder)
        for old in self._snapshots()[:-2]:
            (self.folder / f"journal-{old}.jsonl").unlink(missing_ok=True)
            (self.folder / f"snapshot-{old}.bin").unlink()

    def load(self) -> tuple[dict[str, np.ndarray], dict[str, Any], list[Outcome]] | None:
        """Return the newest snapshot and the outcomes after it; None if there is no snapshot."""
        found = self.snapshot()
        return (*found, self._outcomes()) if found is not None else None

    def snapshot(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """Return the newest snapshot; None if there is none."""
        steps = self._snapshots()
        if not steps:
            return None
        self._base = steps[-1]
        payload = read_sealed(self.folder / f"snapshot-{self._base}.bin")
        with np.load(io.BytesIO(payload), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts = json.loads(arrays.pop("facts").tobytes())
        return arrays, facts

    def _outcomes(self) -> list[Outcome]:
        path = self._path()
        if not path.exists():
            return []
        chain.cut_incomplete_line(path)
        try:
            lines = chain.read(path)
        except chain.BrokenChain as problem:
            raise PevdnError(
                f"line {problem.number} of {path} is damaged; restore the file, or restart the "
                "whole team in another directory."
            ) from None
        self._check = lines[-1]["check"] if lines else ""
        return [Outcome.from_line(line) for line in lines]

    def _path(self) -> Path:
        return self.folder / f"journal-{self._base}.jsonl"

    def _snapshots(self) -> list[int]:
        return sorted(_number(path) for path in self.folder.glob("snapshot-*.bin"))

    # ---- episodes -----------------------------------------------------------------------------

    def write_block(self, block: int, episodes: PackedReplay, facts: bytes) -> None:
        """Write a block of own episodes and the digest of what is public about them (32 bytes).

        Both are on disk when this returns.
        """
        buffer = io.BytesIO()
        episodes.write(buffer)
        write_sealed(self._block(block), facts + buffer.getvalue())

    def read_block(self, block: int) -> PackedReplay | None:
        """Return a block of own episodes; None if it was never written."""
        if not self._block(block).exists():
            return None
        episodes = PackedReplay(0)
        episodes.read(io.BytesIO(read_sealed(self._block(block))[FACTS:]))
        return episodes

    def facts(self, block: int) -> bytes | None:
        """Return the digest of what is public about a block; None if it was never written."""
        path = self._block(block)
        return read_sealed(path)[:FACTS] if path.exists() else None

    def delete_blocks_before(self, block: int) -> None:
        """Delete episodes that had left the buffer when the snapshot was made."""
        for path in self.folder.glob("episodes-*.bin"):
            if _number(path) < block:
                path.unlink()

    def _block(self, block: int) -> Path:
        return self.folder / f"episodes-{block}.bin"


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def write_sealed(path: Path, payload: bytes) -> None:
    """Write a file that starts with its checksum; content and name are on disk after this."""
    write_atomically(path, hashlib.sha256(payload).digest() + payload)
    sync_directory(path.parent)


def read_sealed(path: Path) -> bytes:
    content = path.read_bytes()
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        raise PevdnError(
            f"{path} is damaged; restore it, or restart the whole team in another directory."
        )
    return content[32:]
