"""One agent's replay buffer in host memory, compressed without loss.

An episode is one byte string. It holds only the steps that were played and, of each observation,
only the entries whose bits changed since the previous step. Most entries cost one bit: units out of
sight stay zero, and a unit's type never changes. Nothing is rounded; −0.0 and NaN payloads survive.

Shapes: T maximum steps, O observation, A actions, B minibatch, n steps played.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from pevdn.agent.replay import Episode


class PackedReplay:
    """`capacity` episodes and a scratch slot, as in `replay`; initially empty."""

    def __init__(self, capacity: int) -> None:
        self.rows = [b""] * (capacity + 1)
        self.length = np.zeros(capacity + 1, np.int32)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.rows))

    def store(self, slot: int, episode: Episode) -> None:
        """Store one episode (T, ...) in a slot."""
        self.rows[slot] = pack(episode)
        self.length[slot] = episode.length

    def fetch(self, slots: np.ndarray, into: Episode) -> None:
        """Write the episodes in the slots (B,) into a minibatch (T, B, ...) of zeros."""
        into.length[:] = self.length[slots]
        for b, slot in enumerate(slots):
            if self.rows[slot]:
                own = into.map(partial(_episode, b=b))
                unpack(self.rows[slot], own)

    def open(self, slot: int, opened: np.ndarray) -> None:
        """Replace what was opened (T,) of the episode in a slot."""
        n = int(self.length[slot])
        self.rows[slot] = self.rows[slot][: -4 * n or None] + opened[:n].tobytes()

    def opened(self, slot: int) -> np.ndarray:
        """Return what was opened (n,) of the episode in a slot."""
        row, n = self.rows[slot], int(self.length[slot])
        return np.frombuffer(row, np.float32, n, len(row) - 4 * n)

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            self.write(file)

    def load(self, path: Path) -> None:
        with path.open("rb") as file:
            self.read(file)

    def write(self, file: IO[bytes]) -> None:
        """Write all episodes."""
        np.save(file, self.length)
        np.save(file, np.array([len(row) for row in self.rows]))
        file.writelines(self.rows)

    def read(self, file: IO[bytes]) -> None:
        """Replace all episodes, and the capacity, by what `write` wrote."""
        self.length = np.load(file, allow_pickle=False)
        self.rows = [file.read(size) for size in np.load(file, allow_pickle=False)]


def _episode(x: Any, b: int) -> Any:
    return x[:, b] if x.ndim > 1 else x[b]


def pack(episode: Episode) -> bytes:
    """Encode the first n = `length` steps of an episode (T, ...) and its final observation."""
    n = int(episode.length)
    bits = np.ascontiguousarray(episode.observations[: n + 1]).view(np.uint32)
    changes = np.concatenate([bits[:1], bits[1:] ^ bits[:-1]])
    changed = changes != 0
    pieces = (
        np.packbits(changed),
        np.packbits(episode.available[: n + 1]),
        np.packbits(episode.terminal[:n]),
        episode.actions[:n],
        episode.rewards[:n],
        changes[changed],
        *(() if episode.opened is None else (episode.opened[:n],)),
    )
    return b"".join(piece.tobytes() for piece in pieces)


def unpack(packed: bytes, into: Episode) -> None:
    """Decode into `into`, an episode (T, ...) of zeros with `length` set and T ≥ `length`."""
    n, position = int(into.length), 0

    def take(dtype: Any, count: int) -> np.ndarray:
        nonlocal position
        values = np.frombuffer(packed, dtype, count, position)
        position += values.nbytes
        return values

    def take_bits(shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        return np.unpackbits(take(np.uint8, -(-count // 8)), count=count).view(bool).reshape(shape)

    changed = take_bits((n + 1, into.observations.shape[1]))
    into.available[: n + 1] = take_bits((n + 1, into.available.shape[1]))
    into.terminal[:n] = take_bits((n,))
    into.actions[:n] = take(np.int16, n)
    into.rewards[:n] = take(np.float32, n)
    bits = np.zeros(changed.shape, np.uint32)
    bits[changed] = take(np.uint32, int(np.count_nonzero(changed)))
    if into.opened is not None:
        into.opened[:n] = take(np.float32, n)
    np.bitwise_xor.accumulate(bits, out=np.asarray(into.observations[: n + 1]).view(np.uint32))
