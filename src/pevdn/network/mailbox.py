"""Received messages, by step, kind and sender. Each is accepted once.

A message must belong to the next step or the one after it, and its sender must be allowed to send
this kind. The same message again is a duplicate; a different one in its place is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pevdn.network import wire_pb2 as wire
from pevdn.network.roster import WORLD

FROM_THE_WORLD = {"observation"}
TO_THE_WORLD = {"ready", "actions"}
AHEAD = 2  # steps that a peer may be ahead


class Slot(NamedTuple):
    """Where a message is kept."""

    step: int  # of the protocol
    kind: str
    sender: str
    t: int = 0  # time step, in messages between a party and the world


class Mailbox:
    """The messages that one member has received in the current view."""

    def __init__(self, me: str, completed: Callable[[], int]) -> None:
        self._me, self._completed = me, completed
        self._messages: dict[Slot, Any] = {}

    def put(self, envelope: wire.Envelope, kind: str) -> wire.Receipt:
        """Keep a message, or say why not."""
        body = getattr(envelope, kind)
        slot = Slot(envelope.step, kind, envelope.sender, getattr(body, "t", 0))
        if slot in self._messages:
            if self._messages[slot] == body:
                return wire.Receipt(status=wire.DUPLICATE)
            return refuse(f"a second, different {kind}")
        done = self._completed()
        if envelope.step <= done:
            return refuse("a step that is complete")
        if self._me != WORLD and envelope.step > done + AHEAD:
            return refuse("a step too far ahead")
        self._messages[slot] = body
        return wire.Receipt(status=wire.ACCEPTED)

    def get(self, slot: Slot) -> Any | None:
        return self._messages.get(slot)

    def first(self, kind: str) -> tuple[int, Any] | None:
        """Return step and message of the earliest message of a kind that is not complete."""
        slots = [s for s in self._messages if s.kind == kind and s.step > self._completed()]
        return (min(slots).step, self._messages[min(slots)]) if slots else None

    def discard(self, before: int) -> None:
        """Delete the messages of steps that no peer can ask about any more."""
        self._messages = {s: body for s, body in self._messages.items() if s.step >= before}

    def clear(self) -> None:
        self._messages.clear()


def check_direction(me: str, sender: str, kind: str) -> str | None:
    """Return why a kind of message cannot go from `sender` to `me`, if it cannot."""
    if (sender == WORLD) != (kind in FROM_THE_WORLD):
        return f"{sender} may not send {kind}"
    if (me == WORLD) != (kind in TO_THE_WORLD):
        return f"{me} does not take {kind}"
    return None


def refuse(reason: str) -> wire.Receipt:
    return wire.Receipt(status=wire.REFUSED, reason=reason)
