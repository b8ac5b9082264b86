"""Which processes are in the team: incarnations, the agreed view, and farewells.

A *view* is a set of incarnations, one per member. A restarted process is a new incarnation, so a
restart changes the view and voids all messages of the old one: a share of a dead process is never
added to one of its successor. Members announce the incarnations they know (Hello) until all agree.

This module only keeps the state; `group.py` sends and waits.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pevdn
from pevdn.errors import Interrupted, PevdnError
from pevdn.network import wire_pb2 as wire
from pevdn.network.roster import WORLD, Roster, canonical, differences
from pevdn.storage.files import write_atomically

PROTOCOL = 3  # also of a party's files
CLOCKS_APART = 120.0  # seconds; certificates expire by the clock, so clocks must agree
FINISHED = "done"  # the farewell of a member that has finished


class ViewChanged(Exception):
    """A member has restarted: the messages of the current step are void."""


class Stopped(PevdnError):
    """A member is missing for too long, or has left; everything is saved."""


class Left(Stopped):
    """A member has left and announced the reason to all members."""


class Members:
    """One member's knowledge of the others.

    `completed` returns the last step that this member has on disk. Finished peers are kept in
    `folder`: a restarted process cannot ask them any more.
    """

    def __init__(
        self,
        roster: Roster,
        me: str,
        completed: Callable[[], int],
        mask_key: bytes = b"",
        folder: Path | None = None,
    ) -> None:
        self.roster, self.me, self.completed, self.mask_key = roster, me, completed, mask_key
        self.others = [name for name in roster.names if name != me]
        self.incarnation, self.started = os.urandom(16), time.time()
        self.hellos: dict[str, wire.Hello] = {}
        self.view = b""  # empty: none is agreed on
        self.incompatible: dict[str, str] = {}  # members that cannot train with this one, and why
        self.changed = self.interrupted = False
        self._file = folder / "farewells.json" if folder is not None else None
        self.farewells = self._load_farewells()  # reasons, by member
        self._last_clock = 0.0  # of the last hello

    # ---- hello --------------------------------------------------------------------------------

    def hello(self) -> wire.Hello:
        """Announce this process and the incarnations that it knows."""
        known = self._incarnations()
        names = sorted(known)
        self._last_clock = max(time.time(), self._last_clock + 1e-3)  # increases in any case
        return wire.Hello(
            incarnation=self.incarnation,
            names=names,
            incarnations=[known[name] for name in names],
            completed=self.completed(),
            version=pevdn.__version__,
            protocol=PROTOCOL,
            agreement=canonical(self.roster.agreement),
            clock=self._last_clock,
            started=self.started,
            mask_key=self.mask_key,
        )

    def receive_hello(self, sender: str, hello: wire.Hello) -> wire.Receipt:
        if reason := self._incompatibility(sender, hello):
            self.incompatible[sender] = reason
            return wire.Receipt(status=wire.REFUSED, reason=reason)
        known = self.hellos.get(sender)
        if known is not None and hello.started < known.started:
            return wire.Receipt(status=wire.REFUSED, reason="an older incarnation")
        same = known is not None and known.incarnation == hello.incarnation
        if known is not None and same and hello.clock < known.clock:
            return wire.Receipt(status=wire.DUPLICATE)  # overtaken by a later hello
        self.hellos[sender] = hello
        self.incompatible.pop(sender, None)
        if not same:
            if self.farewells.pop(sender, None) is not None:
                self._save_farewells()
            self.changed = True
        return wire.Receipt(status=wire.ACCEPTED)

    def _incompatibility(self, sender: str, hello: wire.Hello) -> str | None:
        """Return why the two members cannot train together, if they cannot."""
        if (hello.version, hello.protocol) != (pevdn.__version__, PROTOCOL):
            return (
                f"{sender} runs pevdn {hello.version} (protocol {hello.protocol}) and {self.me} "
                f"{pevdn.__version__} (protocol {PROTOCOL}); install the same version."
            )
        apart = abs(hello.clock - time.time())
        if apart > CLOCKS_APART:
            return (
                f"the clocks of {sender} and {self.me} differ by {apart:.0f} seconds, but may "
                f"differ by {CLOCKS_APART:.0f}; set them."
            )
        try:
            unlike = differences(self.roster.agreement, json.loads(hello.agreement))
        except ValueError:
            return f"{sender} sent an agreement that is not JSON."
        if unlike:
            listed = "; ".join(unlike[:3])
            return (
                f"{self.me} and {sender} have different rosters: {listed}; give all members the "
                "same one."
            )
        return None

    # ---- view ---------------------------------------------------------------------------------

    def _incarnations(self) -> dict[str, bytes]:
        known = {name: hello.incarnation for name, hello in self.hellos.items()}
        return {**known, self.me: self.incarnation}

    def proposal(self) -> bytes:
        """Return all known incarnations as one byte string."""
        return _join(sorted(self._incarnations().items()))

    def accepts(self, name: str, proposal: bytes) -> bool:
        """Whether a member knows exactly these incarnations, of all members."""
        hello = self.hellos.get(name)
        if hello is None or len(self.hellos) < len(self.others):
            return False
        return _join(zip(hello.names, hello.incarnations, strict=False)) == proposal

    def install(self, proposal: bytes) -> dict[str, int]:
        """Start a view; return the step that each member had completed."""
        self.view = hashlib.sha256(b"view" + proposal).digest()[:16]
        peers = {name: self.hellos[name].completed for name in self.others}
        return {self.me: self.completed(), **peers}

    def is_needed(self, gone: Iterable[str]) -> bool:
        """Whether a member that is still here missed a step that this one knows the outcome of."""
        here = [hello for name, hello in self.hellos.items() if name not in (*gone, WORLD)]
        return any(hello.completed < self.completed() for hello in here)

    # ---- farewell -----------------------------------------------------------------------------

    def receive_farewell(self, sender: str, farewell: wire.Farewell) -> wire.Receipt:
        self.farewells[sender] = farewell.reason
        self._save_farewells()
        return wire.Receipt(status=wire.ACCEPTED)

    def unfinished(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.farewells.get(name) != FINISHED]

    def presumed_finished(self, silent: list[str], ended: bool) -> list[str]:
        """Return which of the silent members have finished, as far as can be known.

        A process restarted at the very end may have missed their farewells. If no party answers,
        and this one has `ended` or has heard of one that finished, all silent members have.
        """
        parties = [name for name in self.others if name != WORLD]
        alone = all(name in silent for name in self.unfinished(parties))
        if alone and (ended or FINISHED in self.farewells.values()):
            return silent
        waiting = self.unfinished(silent)
        return [name for name in silent if name not in waiting]

    def _save_farewells(self) -> None:
        if self._file is not None:
            done = sorted(name for name, reason in self.farewells.items() if reason == FINISHED)
            write_atomically(self._file, json.dumps(done))

    def _load_farewells(self) -> dict[str, str]:
        if self._file is None or not self._file.exists():
            return {}
        return dict.fromkeys(json.loads(self._file.read_text()), FINISHED)

    # ---- checks -------------------------------------------------------------------------------

    def check_view(self) -> None:
        """Raise if the current step cannot go on: on request, or since a member restarted."""
        if self.interrupted:
            raise Interrupted(
                f"{self.me} was stopped; everything is saved, and the same command continues."
            )
        if self.changed:
            raise ViewChanged

    def check_members(self) -> None:
        """Raise if a member cannot take part or has left before the end."""
        for reason in self.incompatible.values():
            raise Stopped(reason)
        for name, reason in self.farewells.items():
            if reason != FINISHED:
                raise Left(f"{name} has stopped: {reason}")


def _join(incarnations: Iterable[tuple[str, bytes]]) -> bytes:
    return b"".join(name.encode() + b"\0" + incarnation for name, incarnation in incarnations)
