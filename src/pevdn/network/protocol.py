"""The messages between parties in one step of the protocol.

    agree_on_seed   COMMIT to a nonce and compare public facts; REVEAL it; check the commitments
    compare_facts   compare public facts alone: if openings are noised, no seed is needed
    open_sum        SHARE the encoded messages; sum the shares; OPEN the partial sums; compare
    compare         exchange digests: detects a party that equivocates

Nothing else leaves a party for its peers (wire.proto).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pevdn.errors import PevdnError
from pevdn.exchange import modular
from pevdn.network import secure_sum
from pevdn.network import wire_pb2 as wire
from pevdn.network.group import Group
from pevdn.network.roster import Roster
from pevdn.network.status import Status
from pevdn.network.streams import Secret, commitment, fresh


class Protocol:
    """One party's side of every exchange with its peers.

    If `room` is not 0, sums are padded to multiples of that many words: in pe-vdn-c the number of
    words would reveal the sample to an outsider who counts bytes.
    """

    def __init__(
        self, roster: Roster, me: str, secret: Secret, group: Group, status: Status, room: int = 0
    ) -> None:
        self.me, self.group, self.status, self._room = me, group, status, room
        self.peers = [party.name for party in roster.parties if party.name != me]
        self._run, self._mode, self._secret = roster.run, roster.mode, secret
        self._exchange, self._modulus = roster.config.exchange, roster.config.settings.modulus

    def start_view(self) -> None:
        """Agree on masks with the incarnations of this view; a mask is never used twice."""
        public = {name: self.group.members.hellos[name].mask_key for name in self.peers}
        self._masks = secure_sum.Masks(self.me, self._secret.mask_key(), public, self._run)

    # ---- commit and reveal --------------------------------------------------------------------

    def nonce(self, step: int) -> bytes:
        """Return this party's part of a seed, the same however often a step is tried."""
        return self._secret.stream("nonce", self._run, step).bytes(32)

    async def agree_on_seed(self, step: int, facts: bytes) -> dict[str, bytes]:
        """Return all parties' nonces, whose hash seeds the minibatches of a block.

        Every party commits to its nonce before it sees another's. `facts` is a digest of what is
        public about the block.
        """
        nonce = self.nonce(step)
        commits = await self._commit(step, nonce, facts)
        self._check_facts(step, facts, {name: body.facts for name, body in commits.items()})
        revealed = await self._reveal(step, nonce)
        self._check_commitments(step, commits, revealed)
        return {self.me: nonce, **revealed}

    async def _commit(self, step: int, nonce: bytes, facts: bytes) -> dict[str, wire.Commit]:
        sealed = commitment(nonce, self.me, self._run, step)
        body = wire.Commit(commitment=sealed, facts=facts)
        return await self.group.exchange(self.peers, step, "commit", body)

    async def compare_facts(self, step: int, facts: bytes) -> None:
        """Check that all parties have the same `facts`, a digest of what is public of a block."""
        body = wire.Digest(digest=facts)
        digests = await self.group.exchange(self.peers, step, "digest", body)
        self._check_facts(step, facts, {name: body.digest for name, body in digests.items()})

    def _check_facts(self, step: int, facts: bytes, received: dict[str, bytes]) -> None:
        others = sorted(name for name, other in received.items() if other != facts)
        if others:
            raise PevdnError(
                f"{self.me} and {' and '.join(others)} received different rewards, lengths or ends "
                f"of the episodes of step {step}; the world or one of them is faulty."
            )

    async def _reveal(self, step: int, nonce: bytes) -> dict[str, bytes]:
        body = wire.Reveal(nonce=nonce)
        revealed = await self.group.exchange(self.peers, step, "reveal", body)
        return {name: body.nonce for name, body in revealed.items()}

    def _check_commitments(
        self, step: int, commits: dict[str, wire.Commit], nonces: dict[str, bytes]
    ) -> None:
        for name, body in commits.items():
            if commitment(nonces[name], name, self._run, step) != body.commitment:
                raise PevdnError(
                    f"{name} revealed a nonce in step {step} that does not match its commitment; "
                    "it does not follow the protocol."
                )

    # ---- the secure sum -----------------------------------------------------------------------

    async def open_sum(self, step: int, words: np.ndarray) -> np.ndarray:
        """Return Σ of all parties' words, as the algorithm forms it; equal for all parties."""
        if self._exchange == "alone":  # the digests only confirm that the step is complete
            await self.compare(step, words[:0], "sums")
            return words[:0]
        padded = self._pad(words)
        if self._exchange == "broadcast":
            total = await self._open(step, "plain", wire.Plain, padded)
        elif self._mode == "pairwise-masks":
            mask = self._masks.mask(len(padded), self._modulus, step, self.group.view)
            masked = modular.add(padded, mask, self._modulus)
            total = await self._open(step, "masked", wire.Masked, masked)
        else:
            held = await self._share(step, padded)
            total = await self._open(step, "partial_sum", wire.PartialSum, held, "talking")
        await self.compare(step, total, "sums")
        return total[: len(words)]

    def _pad(self, words: np.ndarray) -> np.ndarray:
        if self._room == 0:
            return words
        size = self._room * max(1, -(-len(words) // self._room))
        return np.concatenate([words, np.zeros(size - len(words), np.uint32)])

    async def _share(self, step: int, words: np.ndarray) -> np.ndarray:
        """Send one share to each peer; return the sum of the shares that this party holds."""
        n = len(self.peers) + 1
        own, *shares = secure_sum.split(words, n, self._modulus, fresh())
        bodies = {
            name: {"share": wire.Share(words=secure_sum.to_bytes(share))}
            for name, share in zip(self.peers, shares, strict=True)
        }
        with self.status.spending("talking"):
            await self.group.send_each(bodies, step)
        with self.status.spending("waiting"):
            held = await self.group.collect(self.peers, step, "share")
        return self._add_up(own, held)

    async def _open(
        self, step: int, kind: str, message: Any, own: np.ndarray, receiving: str = "waiting"
    ) -> np.ndarray:
        """Send a vector to all peers, and return the sum of all parties' vectors.

        `receiving` is what the time is booked on: the first message of a step comes from peers that
        may still compute, so it is waiting.
        """
        with self.status.spending("talking"):
            body = {kind: message(words=secure_sum.to_bytes(own))}
            await self.group.send(self.peers, step, **body)
        with self.status.spending(receiving):
            received = await self.group.collect(self.peers, step, kind)
        return self._add_up(own, received)

    def _add_up(self, own: np.ndarray, received: dict[str, Any]) -> np.ndarray:
        p = self._modulus
        vectors = [
            secure_sum.from_bytes(body.words, len(own), p, name) for name, body in received.items()
        ]
        return secure_sum.add_up([own, *vectors], p)

    async def compare(self, step: int, words: np.ndarray, what: str) -> None:
        """Detect equivocation before any update: all parties must hold the same words."""
        own = wire.Digest(digest=secure_sum.digest(words))
        with self.status.spending("talking"):
            digests = await self.group.exchange(self.peers, step, "digest", own)
        others = sorted(name for name, body in digests.items() if body.digest != own.digest)
        if others:
            raise PevdnError(
                f"{self.me} and {' and '.join(others)} have different {what} in step {step}: a "
                "party equivocated, and no party has learnt from it."
            )
