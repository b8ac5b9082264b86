"""Random streams from the operating system's generator, commitments and joint seeds.

A `Stream` is a ChaCha20 keystream whose key derives from 32 secret bytes and a label by
HKDF-SHA256, so that streams with different labels are independent.

Guarantee: to an observer without the 32 bytes, all numbers of all streams are indistinguishable
from uniform and independent ones (assuming that ChaCha20 and HKDF-SHA256 are secure, and that the
32 bytes are secret and uniform). An observer with the 32 bytes can compute everything. The same
bytes and label give the same numbers, so never use a label for two purposes.

Labels are encoded injectively, with type and length of every part: ("ab", "c"), ("a", "bc"),
("abc",) and ("1",), (1,), (b"1",) all differ.
"""

from __future__ import annotations

import builtins
import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pevdn.errors import PevdnError
from pevdn.exchange.modular import FULL
from pevdn.privacy import secret

KEY = 32  # bytes of a key, a nonce, a seed
LIMIT = 2**38  # bytes of one stream: after these the block counter of ChaCha20 starts again

Label = str | int | bytes


def unambiguous(*parts: Label) -> bytes:
    """Encode a list of parts injectively as one byte string."""
    joined = []
    for part in parts:
        match part:
            case str():
                kind, data = b"s", part.encode()
            case int():
                kind, data = b"i", b"%d" % part
            case bytes():
                kind, data = b"b", part
            case _:
                raise TypeError(f"a label consists of str, int and bytes, not {type(part)}.")
        joined.append(kind + len(data).to_bytes(8, "big") + data)
    return b"".join(joined)


def _derive(key: bytes, purpose: str, *label: Label) -> bytes:
    """Derive 32 bytes, independent of those for another purpose or label."""
    if len(key) != KEY:
        raise ValueError(f"a key has {KEY} bytes, not {len(key)}.")
    return HKDF(SHA256(), KEY, salt=None, info=unambiguous("pevdn", purpose, *label)).derive(key)


def hashed(purpose: str, *parts: Label) -> bytes:
    """Return SHA-256 of purpose and parts, encoded injectively."""
    return hashlib.sha256(unambiguous("pevdn", purpose, *parts)).digest()


class Stream:
    """The keystream of a key and a label, from its start; no number is returned twice.

    Streams with equal key and label are equal, however calls are cut: 3 bytes and then 4 are 7.
    """

    def __init__(self, key: builtins.bytes, *label: Label) -> None:
        chacha = algorithms.ChaCha20(_derive(key, "stream", *label), bytes(16))
        self._encryptor = Cipher(chacha, mode=None).encryptor()
        self._left = LIMIT

    def bytes(self, n: int) -> builtins.bytes:
        """Return the next n bytes."""
        if n > self._left:
            raise PevdnError(
                f"{n} bytes are more than the {self._left} left of a random stream, which would "
                "repeat itself; use one stream for each step."
            )
        self._left -= n
        return self._encryptor.update(bytes(n))

    def words(self, n: int, modulus: int = FULL) -> npt.NDArray[np.uint32]:
        """Return n words, exactly uniform on Z_p for any p from 2 to 2³²; (n,).

        Rejection sampling: keep a word of the keystream if it is below the largest multiple of p
        up to 2³². The running time depends on the rejected words only, which are never used.
        """
        if not 2 <= modulus <= FULL:
            raise ValueError(f"the modulus is {modulus}, but must be from 2 to 2**32.")
        if modulus == FULL:
            return np.frombuffer(self.bytes(4 * n), "<u4").astype(np.uint32)
        largest = np.uint32(FULL - FULL % modulus - 1)
        kept = [np.empty(0, np.uint32)]
        missing = n
        while missing:
            # Draw no more than may be needed, so that no accepted word is lost.
            drawn = np.frombuffer(self.bytes(4 * missing), "<u4").astype(np.uint32)
            kept.append(drawn[drawn <= largest] % np.uint32(modulus))
            missing -= len(kept[-1])
        return np.concatenate(kept)

    def uniform(self, shape: int | tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Return uniform multiples of 2⁻⁵³ in [0, 1)."""
        return (self._integers(shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _integers(self, shape: int | tuple[int, ...]) -> npt.NDArray[np.uint64]:
        """Return uniform 64-bit integers."""
        size = math.prod(shape) if isinstance(shape, tuple) else shape
        drawn = np.frombuffer(self.bytes(8 * size), "<u8").astype(np.uint64)
        return drawn.reshape(shape)


def fresh() -> Stream:
    """Return a stream from fresh bytes, which are never stored."""
    return Stream(os.urandom(KEY), "fresh")


class Secret:
    """32 bytes that a party keeps for a whole training, to draw the same again after a restart.

    They never leave the machine. Whoever reads them can compute everything drawn from them and,
    with pairwise masks, unmask everything that this party has ever sent.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def load_or_create(cls, path: Path) -> Secret:
        """Load a file that only its owner can read; create it if it is missing."""
        return cls(secret.load_or_create(path))

    def stream(self, *label: Label) -> Stream:
        """Return the stream of a label from its start: equal each time, also after a restart."""
        return Stream(self._key, *label)

    def mask_key(self) -> X25519PrivateKey:
        """Return the key for pairwise masks, independent of all streams."""
        return X25519PrivateKey.from_private_bytes(_derive(self._key, "mask key"))


def commitment(nonce: bytes, name: str, run: bytes, step: int) -> bytes:
    """Return a hiding and binding commitment of party `name` to a nonce of 32 random bytes.

    It holds for one party, run and step only, so that no party can replay another's (assuming that
    SHA-256 is one-way and collision-resistant).
    """
    return hashed("commitment", name, run, step, nonce)


def joint_seed(nonces: Mapping[str, bytes], run: bytes, step: int) -> bytes:
    """Return the seed of the team's minibatches from the nonces of all parties.

    No party can choose the seed if one party drew its nonce at random and revealed it only after it
    had all commitments (SHA-256 as a random oracle). The last party to reveal knows the seed first
    and can abort the step, which all parties notice. The seed is public in the team.
    """
    parts = [part for name in sorted(nonces) for part in (name, nonces[name])]
    return hashed("joint seed", run, step, *parts)
