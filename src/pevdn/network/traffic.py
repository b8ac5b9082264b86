"""Counters of a member's traffic."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from pevdn.network.wire_pb2 import Receipt, Status

_MOST_REASONS = 256  # that are counted one by one


@dataclass
class Traffic:
    """Traffic with one member. A sent message counts once it is answered, LATER included."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    seconds: float = 0.0  # between messages and their receipts
    failed: int = 0  # attempts without a receipt


@dataclass
class Counters:
    """Counts everything a transport did. gRPC hides failed handshakes, so they are missing."""

    peers: defaultdict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    calls: int = 0  # received; more than all answers if messages were too large or broke off
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)  # by status and reason

    @property
    def refused(self) -> dict[str, int]:
        """Return how many messages were refused, by reason."""
        return {why: n for (status, why), n in self.answered.items() if status == "REFUSED"}

    def answer(self, receipt: Receipt) -> None:
        key = (_name(receipt), receipt.reason)
        if key not in self.answered and len(self.answered) >= _MOST_REASONS:
            key = (key[0], "other")
        self.answered[key] += 1


def _name(receipt: Receipt) -> str:
    known = receipt.status in Status.values()
    return Status.Name(receipt.status) if known else str(receipt.status)
