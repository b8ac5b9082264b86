"""Secure summation between parties: additive shares or pairwise masks, for words modulo p.

Both give the same sum, bit for bit:

    shares           each party splits its words, sends one share to each party (`split`), all add
                     the shares they hold and open the partial sums, which are added once more
    pairwise masks   each party adds a mask to its words (`Masks`) and opens them; the masks cancel
                     in the sum: one message to each peer instead of two

Guarantee, for both: a coalition of at most n − 2 parties that follow the protocol learns of the
other parties' words only their sum, which the opened total reveals anyway. (n − 1 parties learn the
last one's words by subtraction, so two parties hide nothing from each other, unless their words are
noised as in pe-vdn-d.) It assumes private, authenticated channels and the streams of `streams.py`.
With shares drawn from a stream that is never stored, it also holds if a party's `Secret` is stolen
later; with masks it does not.

Words are uint32 below a modulus p ≤ 2³². The module needs neither JAX nor a network: encoding and
decoding are part of the agent's compiled program, since XLA rounds a division by a constant
differently from NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from pevdn.errors import PevdnError
from pevdn.exchange import modular
from pevdn.network.streams import Stream, hashed

Words = npt.NDArray[np.uint32]


def add_up(vectors: Sequence[Words], modulus: int) -> Words:
    """Return the sum of vectors (n, L) modulo p; (L,). Refuse words outside Z_p."""
    for vector in vectors:
        _check(vector, modulus, vectors[0].shape)
    total: Words = modular.total(vectors, modulus)
    return total.copy()


def split(words: Words, n: int, modulus: int, stream: Stream) -> Words:
    """Split words (L,) into n shares (n, L), with n − 1 uniform ones from the stream.

    `modular.shares` states the guarantee. The stream must serve for nothing else: shares of two
    secrets from the same stream reveal their difference.
    """
    if n < 2:
        raise ValueError(f"{n} share would be the secret itself; a team has at least 2 parties.")
    _check(words, modulus, words.shape)
    uniform = stream.words((n - 1) * words.size, modulus).reshape(n - 1, *words.shape)
    shares: Words = modular.shares(words, list(uniform), modulus)
    return shares


def _check(words: Words, modulus: int, shape: tuple[int, ...], sender: str = "a party") -> None:
    if words.dtype != np.uint32 or words.shape != shape:
        raise ValueError(f"words are uint32 {shape}, not {words.dtype} {words.shape}.")
    if words.size and int(words.max()) >= modulus:
        raise PevdnError(
            f"{sender} sent the word {int(words.max())}, which is not below modulus={modulus}; it "
            "does not follow the protocol."
        )


# ---- pairwise masks -----------------------------------------------------------------------


class Masks:
    """The masks of party `me`; the masks of the whole team sum to 0 in every step.

    Each pair of parties agrees on a key (X25519). From it, run, step, view, names and public keys
    both expand the same pad; the party whose name sorts first adds it, the other subtracts it.
    `public` holds the key of every party by name, optionally including `me`.

    Guarantee: towards a coalition, the masks of the other parties are uniform on Z_p apart from
    their known sum, if there are at least two others. It assumes that Diffie–Hellman on Curve25519
    is hard, that `public` is authentic, and that all parties follow the protocol.

    A pad used for two vectors reveals their difference. So each mask is given once: within a view,
    steps must increase. Across restarts this rests on the view, which depends on random bytes that
    each process draws at its start. Create only one `Masks` per view.
    """

    def __init__(
        self, me: str, private: X25519PrivateKey, public: Mapping[str, bytes], run: bytes
    ) -> None:
        mine = private.public_key().public_bytes_raw()
        if public.get(me, mine) != mine:
            raise PevdnError(f"the mask key given for {me} is not its own; restart the party.")
        others = sorted(set(public) - {me})
        twins = [name for name in others if public[name] == mine]
        if twins:
            raise PevdnError(
                f"{twins[0]} and {me} have the same mask key, so they share a secret; give every "
                "party its own directory."
            )
        if not others:
            raise PevdnError(f"{me} has no peer to mask its messages with; a team has 2 parties.")
        self._me, self._mine, self._run = me, mine, run
        self._public = {name: public[name] for name in others}
        self._agreed = {name: _agree(private, name, key) for name, key in self._public.items()}
        self._last: dict[bytes, int] = {}  # the last step of each view that has its mask

    def mask(self, length: int, modulus: int, step: int, view: bytes) -> Words:
        """Return this party's mask (length,) of a step; once for each step and view."""
        last = self._last.get(view, 0)
        if step <= last:
            raise PevdnError(
                f"the mask of step {step} was requested after step {last} in view "
                f"{view.hex()[:8]}, and a mask used twice hides nothing; resend the old message, "
                "or start a new view."
            )
        self._last[view] = step
        total: Words = np.zeros(length, np.uint32)
        for other in self._agreed:
            pad = self._pad(other, step, view).words(length, modulus)
            signed = pad if self._me < other else modular.negate(pad, modulus)
            total = modular.add(total, signed, modulus)
        return total

    def _pad(self, other: str, step: int, view: bytes) -> Stream:
        """Return the pad that this party shares with `other`."""
        pair = sorted([(self._me, self._mine), (other, self._public[other])])
        (first, first_key), (second, second_key) = pair
        label = (self._run, step, view, first, first_key, second, second_key)
        return Stream(self._agreed[other], "pad", *label)


def _agree(private: X25519PrivateKey, name: str, public: bytes) -> bytes:
    """Return the key that only this party and `name` can compute."""
    if len(public) != 32:
        raise PevdnError(
            f"the mask key of {name} has {len(public)} bytes instead of 32; install the same "
            "version of pevdn on both machines."
        )
    try:
        agreed = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of low order: the result is 0 for every private key
        agreed = bytes(32)
    if not any(agreed):
        raise PevdnError(
            f"the mask key of {name} is a point of low order, which makes its masks public; do not "
            f"train with {name} before you know why."
        )
    return agreed


# ---- on the wire --------------------------------------------------------------------------


def digest(words: Words) -> bytes:
    """Return 32 bytes by which parties compare words. They do not hide the words."""
    return hashed("words", to_bytes(words))


def to_bytes(words: Words) -> bytes:
    """Return uint32, little-endian."""
    return words.astype("<u4").tobytes()


def from_bytes(data: bytes, length: int, modulus: int, sender: str) -> Words:
    """Return the words behind `to_bytes`; refuse another number of them, or words outside Z_p."""
    if len(data) != 4 * length:
        raise PevdnError(
            f"{sender} sent {len(data)} bytes instead of {length} words of 4 bytes; it does not "
            "follow the protocol, or has other episodes."
        )
    words = np.frombuffer(data, "<u4").astype(np.uint32)
    _check(words, modulus, (length,), sender)
    return words
