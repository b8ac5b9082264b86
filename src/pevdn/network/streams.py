"""Everything that a party draws, from the operating system's generator.

A `Stream` is a ChaCha20 keystream. Its key comes by HKDF-SHA256 from 32 secret bytes and a label,
so that streams with different labels are independent of each other.

What it promises: to who does not know the 32 bytes, all numbers of all streams look uniform and
independent, and none of them tells anything of another (assuming that ChaCha20 and HKDF-SHA256 are
what they are believed to be, and that the 32 bytes are secret and uniform). To who does know them,
it promises nothing: everything can be computed again. The same bytes and the same label give the
same numbers, so that a label must never be used for two different things.

A label is written so that no two labels have the same bytes: every part carries its type and its
length, hence ("ab", "c"), ("a", "bc"), ("abc",) and ("1",), (1,), (b"1",) all differ.
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
from pevdn.privacy import secret

KEY = 32  # bytes of a key, a nonce, a seed
FULL = 2**32
LIMIT = 2**38  # bytes of one stream: after these the block counter of ChaCha20 starts again

Label = str | int | bytes


def unambiguous(*parts: Label) -> bytes:
    """One byte string for a list of parts; different lists never give the same one."""
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
                raise TypeError(f"a label is made of str, int and bytes, not {type(part)}.")
        joined.append(kind + len(data).to_bytes(8, "big") + data)
    return b"".join(joined)


def _derive(key: bytes, purpose: str, *label: Label) -> bytes:
    """32 bytes that tell nothing of the key, nor of those for another purpose or label."""
    if len(key) != KEY:
        raise ValueError(f"a key has {KEY} bytes, not {len(key)}.")
    return HKDF(SHA256(), KEY, salt=None, info=unambiguous("pevdn", purpose, *label)).derive(key)


def hashed(purpose: str, *parts: Label) -> bytes:
    """SHA-256 of the parts; equal for no two purposes or lists of parts."""
    return hashlib.sha256(unambiguous("pevdn", purpose, *parts)).digest()


class Stream:
    """The keystream of a key and a label, from its beginning. Nothing is drawn twice.

    Two streams with the same key and label give the same, however the calls are cut: drawing 3 and
    then 4 is drawing 7.
    """

    def __init__(self, key: builtins.bytes, *label: Label) -> None:
        chacha = algorithms.ChaCha20(_derive(key, "stream", *label), bytes(16))
        self._encryptor = Cipher(chacha, mode=None).encryptor()
        self._left = LIMIT

    def bytes(self, n: int) -> builtins.bytes:
        """The next n bytes."""
        if n > self._left:
            raise PevdnError(
                f"{n} bytes are more than the {self._left} that are left of a random stream, which "
                "repeats itself after that; use one stream for each round."
            )
        self._left -= n
        return self._encryptor.update(bytes(n))

    def words(self, n: int, modulus: int = FULL) -> npt.NDArray[np.uint32]:
        """n words, exactly uniform on Z_p for any p from 2 to 2³²; (n,).

        A word of the keystream counts if it is below the largest multiple of p that fits into 32
        bits, and is passed over if not. The time this takes depends on the words passed over,
        which appear nowhere else, and not on those that are returned.
        """
        if not 2 <= modulus <= FULL:
            raise ValueError(f"the modulus is {modulus}; it has to be from 2 to 2**32.")
        if modulus == FULL:
            return np.frombuffer(self.bytes(4 * n), "<u4").astype(np.uint32)
        largest = np.uint32(FULL - FULL % modulus - 1)
        kept = [np.empty(0, np.uint32)]
        missing = n
        while missing:
            # Never more than may be needed, so that nothing accepted is thrown away.
            drawn = np.frombuffer(self.bytes(4 * missing), "<u4").astype(np.uint32)
            kept.append(drawn[drawn <= largest] % np.uint32(modulus))
            missing -= len(kept[-1])
        return np.concatenate(kept)

    def uniform(self, shape: int | tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Uniform multiples of 2⁻⁵³ in [0, 1)."""
        return (self._integers(shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _integers(self, shape: int | tuple[int, ...]) -> npt.NDArray[np.uint64]:
        """Uniform on 64 bits."""
        size = math.prod(shape) if isinstance(shape, tuple) else shape
        drawn = np.frombuffer(self.bytes(8 * size), "<u8").astype(np.uint64)
        return drawn.reshape(shape)


def fresh() -> Stream:
    """A stream that nobody can draw again, not even this process."""
    return Stream(os.urandom(KEY), "fresh")


class Secret:
    """32 bytes that one party keeps for a whole training, to draw the same again after a kill.

    Who reads them can compute all that was drawn from them and, with pairwise masks, take the
    masks off everything that this party has sent, also in the past. They never leave the machine.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def load_or_create(cls, path: Path) -> Secret:
        """From a file that only its owner can read; if there is none, a new one, on the disk."""
        return cls(secret.load_or_create(path))

    def stream(self, *label: Label) -> Stream:
        """The stream of a label, from its beginning: the same each time, also after a restart."""
        return Stream(self._key, *label)

    def mask_key(self) -> X25519PrivateKey:
        """The key with which this party agrees on pairwise masks; tells nothing of any stream."""
        return X25519PrivateKey.from_private_bytes(_derive(self._key, "mask key"))


def commitment(nonce: bytes, name: str, run: bytes, round: int) -> bytes:
    """What `name` shows before anybody reveals a nonce: it cannot be opened to another one.

    It hides a nonce of 32 random bytes, and holds for one party, run and round only, so that
    nobody can pass on another's as its own (assuming SHA-256 is one-way and free of collisions).
    """
    return hashed("commitment", name, run, round, nonce)


def joint_seed(nonces: Mapping[str, bytes], run: bytes, round: int) -> bytes:
    """The seed of the team's minibatches, from what every party has revealed.

    As long as one party drew its nonce at random, and revealed it after it had everybody's
    commitment, no other could choose the seed (SHA-256 as a random function). The last to reveal
    knows the seed before the rest and can stop the round, which all notice. Public in the team.
    """
    parts = [part for name in sorted(nonces) for part in (name, nonces[name])]
    return hashed("joint seed", run, round, *parts)
