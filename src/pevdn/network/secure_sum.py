"""Σ m_i on the wire: the arithmetic of `exchange/secret_shared.py`, for parties apart.

Two ways to the same sum, bit for bit:

    shares           each party splits its words, hands one share to each, all add up what they
                     hold (`split`, `add_up`), and the partial sums are added up again
    pairwise masks   each party adds a mask to its words (`Masks`), all masked words are added up,
                     and the masks cancel: one message to each instead of two

What both promise: who follows the protocol but pools all that it sees with up to n − 2 others
learns of the messages of the rest only their sum, which the opened total gives away anyway. (n − 1
parties together know the last one's message by subtraction, so that two parties hide nothing from
each other.) It is assumed that all follow the protocol, that channels are private and from whom
they say, and that the streams are what `randomness` promises. With shares that holds also against
who steals a party's `Secret` later, if they were drawn from a stream that is gone by then; with
masks it does not.

Words are uint32 below a modulus p ≤ 2³²; there is neither JAX nor a network in here. From real
numbers to words and back it is `secret_shared.encode` and `decode`, in the party's compiled
program: XLA divides by a constant in its own way, so that a `decode` in numpy would not be the same
in the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from pevdn.errors import PevdnError
from pevdn.network.streams import FULL, Stream, hashed

Words = npt.NDArray[np.uint32]
Slots = npt.NDArray[np.int64]


# ---- arithmetic modulo p ------------------------------------------------------------------


def add(a: Words, b: Words, modulus: int) -> Words:
    """(a + b) mod p for a, b < p ≤ 2³², without a wider integer."""
    total = np.add(a, b, dtype=np.uint32)  # wraps modulo 2³²
    if modulus == FULL:
        return total
    p = np.uint32(modulus)
    return np.where((total < a) | (total >= p), np.subtract(total, p), total)


def negate(a: Words, modulus: int) -> Words:
    """−a mod p."""
    if modulus == FULL:
        return np.subtract(np.uint32(0), a)
    return np.where(a == 0, a, np.subtract(np.uint32(modulus), a))


def add_up(vectors: Sequence[Words], modulus: int) -> Words:
    """The sum of vectors (n, L) modulo p; (L,). Words outside Z_p, from whomever, are refused."""
    first, *others = vectors
    total = _checked(first, modulus, first.shape)
    for vector in others:
        total = add(total, _checked(vector, modulus, first.shape), modulus)
    return total.copy()


def _checked(words: Words, modulus: int, shape: tuple[int, ...]) -> Words:
    if words.dtype != np.uint32 or words.shape != shape:
        raise ValueError(f"words are uint32 {shape}, not {words.dtype} {words.shape}.")
    if words.size and int(words.max()) >= modulus:
        raise PevdnError(
            f"a word is {int(words.max())} and not below the modulus {modulus}; a party does not "
            "encode its messages as the team has agreed."
        )
    return words


# ---- shares -------------------------------------------------------------------------------


def split(words: Words, n: int, modulus: int, stream: Stream) -> Words:
    """n shares (n, L) of words (L,): n − 1 uniform ones, and what is missing to the words.

    Any n − 1 of them are uniform on Z_p and independent of the words, to who does not know the
    stream. No part of it may serve for anything else: the shares of two secrets would tell their
    difference.
    """
    if n < 2:
        raise ValueError(f"{n} share would be the secret itself; a team has at least 2 parties.")
    _checked(words, modulus, words.shape)
    uniform = stream.words((n - 1) * words.size, modulus).reshape(n - 1, *words.shape)
    rest = add(words, negate(add_up(list(uniform), modulus), modulus), modulus)
    return np.concatenate([uniform, rest[None]])


# ---- pairwise masks -----------------------------------------------------------------------


class Masks:
    """The masks of party `me`, whose sum over the whole team is 0 in every round.

    Each pair of parties agrees on a key (X25519) that no third one can compute. From it, and from
    run, round, view, names and public keys, both expand the same pad. The one whose name sorts
    first adds it to its mask, the other subtracts it. `public` holds the key of every party by
    name; the own one may be among them.

    What it promises: to parties that pool all they know, the masks of the others are uniform on
    Z_p except that they have a known sum, as long as there are at least two others (assuming that
    the Diffie–Hellman problem on Curve25519 is hard, that `public` is from whom it says, and that
    all follow the protocol).

    A pad that covers two different vectors tells their difference. So a mask is given once: within
    a view, rounds have to rise. That this holds across restarts is the view's part: it must depend
    on something that a process draws when it starts. There must not be two `Masks` for one view.
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
                f"the mask key of {twins[0]} is the one of {me}, so that one of them has the "
                "other's secret; give every party a directory of its own."
            )
        if not others:
            raise PevdnError(f"{me} has nobody to mask its messages with; a team has 2 parties.")
        self._me, self._mine, self._run = me, mine, run
        self._public = {name: public[name] for name in others}
        self._agreed = {name: _agree(private, name, key) for name, key in self._public.items()}
        self._last: dict[bytes, int] = {}  # the last round of each view that has its mask

    def mask(self, length: int, modulus: int, round: int, view: bytes) -> Words:
        """What this party adds to its words in this round (length,); once for a round and view."""
        last = self._last.get(view, 0)
        if round <= last:
            raise PevdnError(
                f"round {round} comes after round {last} in the view {view.hex()[:8]}, and a mask "
                "that is used twice hides nothing; send again what was sent, or start a new view."
            )
        self._last[view] = round
        total = np.zeros(length, np.uint32)
        for other in self._agreed:
            pad = self._pad(other, round, view).words(length, modulus)
            total = add(total, pad if self._me < other else negate(pad, modulus), modulus)
        return total

    def _pad(self, other: str, round: int, view: bytes) -> Stream:
        """The same on both sides, whoever asks."""
        pair = sorted([(self._me, self._mine), (other, self._public[other])])
        (first, first_key), (second, second_key) = pair
        where = (self._run, round, view, first, first_key, second, second_key)
        return Stream(self._agreed[other], "pad", *where)


def _agree(private: X25519PrivateKey, name: str, public: bytes) -> bytes:
    """The key that only this party and `name` can compute."""
    if len(public) != 32:
        raise PevdnError(
            f"the mask key of {name} has {len(public)} bytes and not 32; it runs another version "
            "of pevdn, or is not what it says."
        )
    try:
        agreed = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # of low order: the outcome is 0 for every private key
        agreed = bytes(32)
    if not any(agreed):
        raise PevdnError(
            f"the mask key of {name} is one with which anybody can compute the masks, and is "
            f"refused; do not train with {name} before it is known why."
        )
    return agreed


# ---- on the wire --------------------------------------------------------------------------


def digest(words: Words) -> bytes:
    """32 bytes by which parties see whether they hold the same words. It does not hide them."""
    return hashed("words", to_bytes(words))


def to_bytes(words: Words) -> bytes:
    """uint32, little-endian."""
    return words.astype("<u4").tobytes()


def from_bytes(data: bytes, length: int) -> Words:
    """The words behind `to_bytes`, exactly `length` of them."""
    if len(data) != 4 * length:
        raise PevdnError(
            f"{len(data)} bytes came where {length} words of 4 bytes were due; a party trains with "
            "another minibatch, or another version of pevdn."
        )
    return np.frombuffer(data, "<u4").astype(np.uint32)


# ---- which episodes -----------------------------------------------------------------------
# As `exchange/indices.py`, from uniform words (capacity,) that all parties hold. Slots that point
# at the scratch slot are left out.


def choose_uniform(tickets: Words, filled: int, batch_size: int) -> Slots:
    """`batch_size` different slots of the first `filled`, each set equally likely."""
    if batch_size > filled:
        raise ValueError(f"{batch_size} episodes cannot be chosen from {filled}.")
    highest = ~(tickets[:filled] >> np.uint32(9))  # the 23 bits that a float32 has; largest first
    return np.argsort(highest, kind="stable")[:batch_size]


def choose_poisson(tickets: Words, filled: int, rate: float) -> Slots:
    """Each of the first `filled` slots independently with probability q = `rate`."""
    if rate >= 1:
        return np.arange(filled)
    return np.flatnonzero(tickets[:filled] < np.uint32(int(rate * 2**32)))


def longest_first(slots: Slots, lengths: npt.NDArray[np.integer]) -> Slots:
    """The slots in the order of their episodes' lengths; among equals, as they were."""
    return slots[np.argsort(-lengths[slots].astype(np.int64), kind="stable")]
