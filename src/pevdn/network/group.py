"""Group communication: agree on a membership view, then send and collect the messages of a step.

Membership is in `membership.py`, received messages in `mailbox.py`, delivery in `transport.py`.
Every wait ends with the message, with a change of the view, or with the name of the missing member.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pevdn.network import wire_pb2 as wire
from pevdn.network.mailbox import Mailbox, Slot, check_direction, refuse
from pevdn.network.membership import FINISHED, Members, Stopped
from pevdn.network.roster import Roster
from pevdn.network.transport import Transport, Unreachable

GREETING = 10.0  # seconds after which a hello that was not taken is out of date
PROBE = 2.0  # seconds in which a running process answers
LINGER = 10.0  # seconds after which a finished member that takes no hello is presumed gone
NO_VIEW = bytes(16)  # the view of a farewell before any was agreed on


class Group:
    """One member's connection to all others.

    `completed` returns the last step that this member has on disk. `outcome_of` answers a peer that
    missed the end of a step, and `ended` says whether this member has nothing left to do.
    """

    def __init__(
        self,
        roster: Roster,
        me: str,
        key: bytes,
        completed: Callable[[], int],
        mask_key: bytes = b"",
        listen: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self.roster, self.me = roster, me
        self.members = Members(roster, me, completed, mask_key, folder)
        self.mailbox = Mailbox(me, completed)
        self.transport = Transport(roster, me, key, self.receive, listen=listen)
        self.waiting_for: list[str] = []
        self.ended: Callable[[], bool] = lambda: False
        self.outcome_of: Callable[[int], wire.Outcome | None] = lambda _: None
        self._waiting: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def others(self) -> list[str]:
        return self.members.others

    @property
    def view(self) -> bytes:
        return self.members.view

    async def start(self) -> None:
        await self.transport.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.transport.stop()

    def interrupt(self) -> None:
        """Stop at the next moment where no step is half done."""
        self.members.interrupted = True
        self._wake()

    # ---- receive ------------------------------------------------------------------------------

    def receive(self, envelope: wire.Envelope) -> wire.Receipt:
        """Handle a message from an authenticated sender; the transport returns the receipt."""
        receipt = self._receive(envelope)
        self._wake()
        return receipt

    def _receive(self, envelope: wire.Envelope) -> wire.Receipt:
        kind, sender = envelope.WhichOneof("body"), envelope.sender
        if kind == "hello":
            return self.members.receive_hello(sender, envelope.hello)
        if kind == "farewell":
            return self.members.receive_farewell(sender, envelope.farewell)
        if not self.view or envelope.view != self.view:
            return wire.Receipt(status=wire.LATER, reason="another view")
        if reason := check_direction(self.me, sender, kind):
            return refuse(reason)
        if kind == "recall":
            return self._answer_recall(envelope)
        return self.mailbox.put(envelope, kind)

    def _answer_recall(self, envelope: wire.Envelope) -> wire.Receipt:
        outcome = self.outcome_of(envelope.step)
        if outcome is None:
            return refuse("not the last step")
        reply = self._envelope(envelope.step, outcome=outcome)
        sending = self.transport.send(envelope.sender, reply, until=self._deadline())
        task = asyncio.create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return wire.Receipt(status=wire.ACCEPTED)

    # ---- agree on a view ----------------------------------------------------------------------

    async def agree(self) -> dict[str, int]:
        """Agree on a view with all members; return the step that each had completed."""
        members, deadline, began = self.members, self._deadline(), time.monotonic()
        members.view = b""
        self.mailbox.clear()
        announced: dict[str, bytes] = {}
        with self._sending() as sending:
            while True:
                members.changed = False
                members.check_view()
                proposal = members.proposal()
                for name in self.others:
                    if announced.get(name) != proposal:
                        if name in sending:
                            sending[name].cancel()
                        sending[name] = asyncio.create_task(self._greet(name, deadline))
                        announced[name] = proposal
                # Report members not heard of, not the ones that wait for them.
                unheard = [name for name in self.others if name not in members.hellos]
                undecided = [n for n in self.others if not members.accepts(n, proposal)]
                self.waiting_for = unheard or undecided
                members.check_members()
                for name, task in sending.items():
                    if task.done() and task.result().status == wire.REFUSED:
                        raise Stopped(f"{name} refuses {self.me}: {task.result().reason}")
                if not self.waiting_for and all(task.done() for task in sending.values()):
                    return members.install(proposal)
                silent = [name for name in self.others if not sending[name].done()]
                gone = members.presumed_finished(silent, self.ended())
                if gone and time.monotonic() > began + LINGER and not members.is_needed(gone):
                    raise self._missing(gone)
                await self._wait(deadline, sending.values())

    async def _greet(self, name: str, deadline: float) -> wire.Receipt:
        """Send a hello until it arrives: a fresh one every few seconds, since it holds the time."""
        while True:
            until = min(deadline, time.monotonic() + GREETING)
            try:
                return await self.transport.send(name, self._hello(), until=until)
            except Unreachable:
                if time.monotonic() >= deadline:
                    raise

    # ---- send and collect ---------------------------------------------------------------------

    async def send(self, names: Iterable[str], step: int, **body: Any) -> None:
        """Send the same message to all of them; return when all have it."""
        await self.send_each({name: body for name in names}, step)

    async def send_each(self, bodies: dict[str, dict[str, Any]], step: int) -> None:
        """Send each member its message; return when all have theirs."""
        deadline = self._deadline()
        with self._sending() as sending:
            for name, body in bodies.items():
                work = self.transport.send(name, self._envelope(step, **body), until=deadline)
                sending[name] = asyncio.create_task(work)
            while not all(task.done() for task in sending.values()):
                self.members.check_view()
                self.members.check_members()
                self.waiting_for = [name for name, task in sending.items() if not task.done()]
                await self._wait(deadline, sending.values())
            for name, task in sending.items():
                receipt = task.result()
                if receipt.status == wire.REFUSED:
                    self.members.check_view()
                    raise Stopped(
                        f"{name} refused a message of {self.me} in step {step}: {receipt.reason}."
                    )

    @contextmanager
    def _sending(self) -> Iterator[dict[str, asyncio.Task[wire.Receipt]]]:
        """Cancel what is still being sent at the end; name a member that cannot be reached."""
        tasks: dict[str, asyncio.Task[wire.Receipt]] = {}
        try:
            yield tasks
        except Unreachable as problem:
            raise self._missing([problem.name]) from None
        finally:
            self.waiting_for = []
            for task in tasks.values():
                task.cancel()

    async def collect(
        self, names: Iterable[str], step: int, kind: str, t: int = 0
    ) -> dict[str, Any]:
        """Wait for a message of each of them; return the messages by name."""
        names, deadline = list(names), self._deadline()
        try:
            while True:
                self.members.check_view()
                found = {name: self.mailbox.get(Slot(step, kind, name, t)) for name in names}
                self.waiting_for = [name for name, body in found.items() if body is None]
                if not self.waiting_for:
                    return found
                self.members.check_members()
                await self._wait(deadline)
        finally:
            self.waiting_for = []

    async def exchange(
        self, names: Iterable[str], step: int, kind: str, body: Any
    ) -> dict[str, Any]:
        """Send all of them a message, and wait for the same kind from each."""
        names = list(names)
        work = self.send(names, step, **{kind: body}), self.collect(names, step, kind)
        _, received = await _gather(*work)
        found: dict[str, Any] = received
        return found

    async def next_request(self, names: Iterable[str], kind: str) -> tuple[int, Any] | None:
        """Wait for the next message of a kind from any of them; None once all have finished.

        Parties are silent while they wait for one of them, and report it when they give up.
        """
        names = list(names)
        deadline = time.monotonic() + 2 * self.roster.patience
        while True:
            self.members.check_view()
            self.members.check_members()
            if request := self.mailbox.first(kind):
                return request
            unfinished = self.members.unfinished(names)
            if not unfinished:
                return None
            if time.monotonic() > deadline:
                raise self._missing(unfinished)
            await self._pause(deadline)

    def discard(self, before: int) -> None:
        self.mailbox.discard(before)

    # ---- leave --------------------------------------------------------------------------------

    async def leave(self) -> bool:
        """Announce the end and wait for the others' farewells; return whether all arrived.

        A member that missed the last step may come back meanwhile and recall its outcome.
        """
        await self.say_farewell(FINISHED, self.roster.patience)
        deadline = self._deadline()
        while missing := self.members.unfinished(self.others):
            self.members.check_view()
            self.waiting_for = missing
            if time.monotonic() > deadline:
                break
            await self._pause(deadline)
        self.waiting_for = []
        return not missing

    async def say_farewell(self, reason: str, seconds: float) -> None:
        """Tell all reachable members that this one stops, and why."""
        until = time.monotonic() + seconds
        envelope = self._envelope(0, farewell=wire.Farewell(reason=reason))
        sends = [self.transport.send(name, envelope, until=until) for name in self.others]
        await asyncio.gather(*sends, return_exceptions=True)

    # ---- wait ---------------------------------------------------------------------------------

    def _envelope(self, step: int, **body: Any) -> wire.Envelope:
        run, view = self.roster.run, self.view or NO_VIEW
        return wire.Envelope(run=run, view=view, step=step, sender=self.me, **body)

    def _hello(self) -> wire.Envelope:
        return wire.Envelope(run=self.roster.run, sender=self.me, hello=self.members.hello())

    def _deadline(self) -> float:
        return time.monotonic() + self.roster.patience

    async def _wait(self, deadline: float, tasks: Iterable[asyncio.Task[Any]] = ()) -> None:
        if time.monotonic() > deadline:
            await self._give_up(list(self.waiting_for))
        await self._pause(deadline, tasks)

    async def _give_up(self, names: list[str]) -> NoReturn:
        """Report unreachable members, not the ones blocked by them."""
        until = time.monotonic() + PROBE
        probes = [self.transport.send(name, self._hello(), until=until) for name in names]
        answers = await asyncio.gather(*probes, return_exceptions=True)
        gone = [n for n, a in zip(names, answers, strict=True) if isinstance(a, BaseException)]
        while True:
            self.members.check_view()
            self.members.check_members()
            if gone or time.monotonic() > until + 2 * PROBE:
                raise self._missing(gone or names)
            await self._pause(until + 2 * PROBE)  # reachable members report whom they miss

    async def _pause(self, deadline: float, tasks: Iterable[asyncio.Task[Any]] = ()) -> None:
        """Sleep until a message arrives, a task ends, or a second has passed."""
        running = [task for task in tasks if not task.done()]
        news = asyncio.get_running_loop().create_future()
        self._waiting.add(news)
        seconds = min(1.0, max(0.0, deadline - time.monotonic()) + 0.01)
        try:
            await asyncio.wait(
                [news, *running], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self._waiting.discard(news)

    def _wake(self) -> None:
        for news in self._waiting:
            if not news.done():
                news.set_result(None)

    def _missing(self, names: Iterable[str]) -> Stopped:
        listed = " and ".join(names) or "no member"
        return Stopped(
            f"{listed} did not answer for {self.roster.patience:g} seconds; everything is saved. "
            f"Start {listed} again, then {self.me} with the same command."
        )


async def _gather(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return all results; if one fails, cancel the others."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
