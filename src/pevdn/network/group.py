"""Who is there, and what has been said: the part of a member that all others depend on.

A *view* is a set of incarnations, one of each member. A process that starts anew is another
incarnation, so a restart changes the view, and everything that was said in the old one is void:
no share of a dead process is ever added to one of its successor. Members agree on a view by
telling each other whom they have heard of; then they say which round they had completed, and go
on from there together.

A message counts once. It has to be of the view, of a round that is next or under way, and of a
kind that its sender may say; the same one again is harmless, another one in its place is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, NoReturn

import pevdn
from pevdn.errors import Interrupted, PevdnError
from pevdn.network import wire_pb2 as wire
from pevdn.network.roster import WORLD, Roster, canonical, differences
from pevdn.network.transport import Transport, Unreachable
from pevdn.storage.files import write_atomically

PROTOCOL = 1
CLOCKS_APART = 120.0  # seconds; certificates expire by the clock, so clocks have to agree
GREETING = 10.0  # seconds after which a hello that nobody took is out of date
ASKING = 2.0  # seconds in which one that runs at all answers
OF_THE_WORLD = {"sight"}
TO_THE_WORLD = {"ready", "choice"}
NOWHERE = bytes(16)  # the view of a farewell before any was agreed on
DONE = "done"  # the farewell of a member that has finished
LINGER = 10.0  # seconds after which such a one that takes no hello is thought to be gone


class ViewChanged(Exception):
    """A member has started anew: what is under way is void."""


class Stopped(PevdnError):
    """A member is missing for too long, or has left; everything is saved."""


class Left(Stopped):
    """A member has left, and has told everybody why."""


class Group:
    """One member's knowledge of the others, and its mailbox."""

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
        self.roster, self.me, self.completed, self.mask_key = roster, me, completed, mask_key
        self.others = [name for name in roster.names if name != me]
        self.transport = Transport(roster, me, key, self.receive, listen=listen)
        self.incarnation, self.started = os.urandom(16), time.time()
        self._said_at = 0.0  # the clock of the last hello
        self.heard: dict[str, wire.Hello] = {}
        self.view = b""  # none is agreed on
        self._file = folder / "farewells.json" if folder is not None else None
        self.left: dict[str, str] = self._remembered()  # who said farewell, and why
        self.unlike: dict[str, str] = {}  # with whom one cannot train, and why
        self.waiting_for: list[str] = []
        self.ended: Callable[[], bool] = lambda: False  # whether this member has nothing left to do
        self.on_recall: Callable[[int], wire.Recalled | None] = lambda _: None
        self._box: dict[tuple[int, str, str, int], Any] = {}
        self._listening: set[asyncio.Future[None]] = set()
        self._changed = self._interrupted = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        await self.transport.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.transport.stop()

    # ---- hearing ----------------------------------------------------------------------------

    def receive(self, envelope: wire.Envelope) -> wire.Receipt:
        """What the transport asks: whether a message from its proven sender is wanted."""
        kind = envelope.WhichOneof("body")
        if kind == "hello":
            return self._hear(envelope.sender, envelope.hello)
        if kind == "farewell":
            self.left[envelope.sender] = envelope.farewell.reason
            self._remember()
            self._wake()
            return _receipt(wire.ACCEPTED)
        if not self.view or envelope.view != self.view:
            return _receipt(wire.LATER, "another view")
        if (envelope.sender == WORLD) != (kind in OF_THE_WORLD):
            return _refused(f"{kind} is not for the sender to say")
        if (self.me == WORLD) != (kind in TO_THE_WORLD):
            return _refused(f"{kind} is not for me to hear")
        if kind == "recall":
            return self._recall(envelope)
        body = getattr(envelope, kind)
        name = (envelope.round, kind, envelope.sender, getattr(body, "step", 0))
        if name in self._box:
            if self._box[name] == body:
                return _receipt(wire.DUPLICATE)
            return _refused(f"another {kind} than before")
        done = self.completed()
        if envelope.round <= done:
            return _refused("a round that is over")
        if self.me != WORLD and envelope.round > done + 2:
            return _refused("a round that is far ahead")
        self._box[name] = body
        self._wake()
        return _receipt(wire.ACCEPTED)

    def _hear(self, sender: str, hello: wire.Hello) -> wire.Receipt:
        """Somebody has started, or tells whom it knows."""
        if problem := self._difference(sender, hello):
            self.unlike[sender] = problem
            self._wake()
            return _refused(problem)
        known = self.heard.get(sender)
        if known is not None and hello.started < known.started:
            return _refused("a process that is no more")
        same = known is not None and known.incarnation == hello.incarnation
        if known is not None and same and hello.clock < known.clock:
            return _receipt(wire.DUPLICATE)  # overtaken by one that says more
        self.heard[sender] = hello
        self.unlike.pop(sender, None)
        if not same:
            if self.left.pop(sender, None) is not None:
                self._remember()
            self._changed = True
        self._wake()
        return _receipt(wire.ACCEPTED)

    def _remember(self) -> None:
        """Who is done is gone soon: one that is killed now will not hear it again."""
        if self._file is not None:
            done = sorted(name for name, reason in self.left.items() if reason == DONE)
            write_atomically(self._file, json.dumps(done))

    def _remembered(self) -> dict[str, str]:
        if self._file is None or not self._file.exists():
            return {}
        return dict.fromkeys(json.loads(self._file.read_text()), DONE)

    def all_done(self, names: Iterable[str]) -> bool:
        return all(self.left.get(name) == DONE for name in names)

    def _difference(self, sender: str, hello: wire.Hello) -> str | None:
        """Why the two cannot train together, in words."""
        if (hello.version, hello.protocol) != (pevdn.__version__, PROTOCOL):
            return (
                f"{sender} runs pevdn {hello.version} (protocol {hello.protocol}) and {self.me} "
                f"{pevdn.__version__} (protocol {PROTOCOL}); install the same version."
            )
        apart = abs(hello.clock - time.time())
        if apart > CLOCKS_APART:
            return (
                f"the clocks of {sender} and {self.me} are {apart:.0f} seconds apart, and may be "
                f"{CLOCKS_APART:.0f}; set them."
            )
        try:
            found = differences(self.roster.agreement, json.loads(hello.agreement))
        except ValueError:
            return f"{sender} sent an agreement that cannot be read."
        if found:
            told = "; ".join(found[:3])
            return f"{self.me} and {sender} have different rosters: {told}; give all the same one."
        return None

    def _recall(self, envelope: wire.Envelope) -> wire.Receipt:
        """Answer a member that missed the end of a round."""
        found = self.on_recall(envelope.round)
        if found is None:
            return _refused("a round that is not the last one")
        reply = self._envelope(envelope.round, recalled=found)
        self._in_background(self.transport.send(envelope.sender, reply, until=self._deadline()))
        return _receipt(wire.ACCEPTED)

    # ---- agreeing -----------------------------------------------------------------------------

    async def agree(self) -> dict[str, int]:
        """A view that everybody is in, and the round that each member had completed then."""
        self.view, deadline, began = b"", self._deadline(), time.monotonic()
        self._box.clear()
        told: dict[str, bytes] = {}
        sending: dict[str, asyncio.Task[Any]] = {}
        try:
            while True:
                self._changed = False
                self._check_changed()
                mine = self._incarnations()
                for name in self.others:
                    if told.get(name) != mine:
                        if name in sending:
                            sending[name].cancel()
                        sending[name] = asyncio.create_task(self._greet(name, deadline))
                        told[name] = mine
                unheard = [n for n in self.others if n not in self.heard]
                self.waiting_for = unheard or [
                    n for n in self.others if not self._agrees(n, mine)
                ]  # who was heard cannot agree before all were: it is not to blame
                self._check_left()
                for name, task in sending.items():
                    if task.done() and task.result().status == wire.REFUSED:
                        raise Stopped(f"{name} refuses {self.me}: {task.result().reason}")
                if not self.waiting_for and all(task.done() for task in sending.values()):
                    break
                gone = self._gone([n for n in self.others if not sending[n].done()])
                if gone and time.monotonic() > began + LINGER and not self._is_needed(gone):
                    raise self._missing(gone)
                await self._more_news(deadline, extra=sending.values())
        except Unreachable as problem:
            raise self._missing([problem.name]) from None
        finally:
            for task in sending.values():
                task.cancel()
        self.view = hashlib.sha256(b"view" + mine).digest()[:16]
        self.waiting_for = []
        return {self.me: self.completed(), **{n: self.heard[n].completed for n in self.others}}

    async def _greet(self, name: str, deadline: float) -> wire.Receipt:
        """Say hello until it is heard: anew every few seconds, since a hello tells the time."""
        while True:
            until = min(deadline, time.monotonic() + GREETING)
            try:
                return await self.transport.send(name, self._hello(), until=until)
            except Unreachable:
                if time.monotonic() >= deadline:
                    raise

    def _incarnations(self) -> bytes:
        """Of all that were heard of, in one string."""
        known = {self.me: self.incarnation}
        known |= {name: hello.incarnation for name, hello in self.heard.items()}
        return b"".join(name.encode() + b"\0" + known[name] for name in sorted(known))

    def _agrees(self, name: str, mine: bytes) -> bool:
        hello = self.heard.get(name)
        if hello is None or len(self.heard) < len(self.others):
            return False
        pairs = zip(hello.names, hello.incarnations, strict=False)
        return b"".join(n.encode() + b"\0" + i for n, i in pairs) == mine

    def _gone(self, silent: list[str]) -> list[str]:
        """Who of those that take no hello had finished, as far as can be known.

        One that is started again at the very end may not have heard it: if no party answers, and
        it has nothing left to do itself, all are.
        """
        done = [name for name in silent if self.left.get(name) == DONE]
        parties = [name for name in self.others if name != WORLD]
        alone = all(name in silent or self.left.get(name) == DONE for name in parties)
        over = self.ended() or DONE in self.left.values()
        return silent if alone and over else done

    def _is_needed(self, gone: list[str]) -> bool:
        """Whether somebody has missed the end of a round that this member knows of."""
        there = [hello for name, hello in self.heard.items() if name not in (*gone, WORLD)]
        return any(hello.completed < self.completed() for hello in there)

    def _hello(self) -> wire.Envelope:
        known = {self.me: self.incarnation}
        known |= {name: hello.incarnation for name, hello in self.heard.items()}
        names = sorted(known)
        self._said_at = max(time.time(), self._said_at + 1e-3)  # rises, also if the clock is set
        return wire.Envelope(
            run=self.roster.run,
            sender=self.me,
            hello=wire.Hello(
                incarnation=self.incarnation,
                names=names,
                incarnations=[known[name] for name in names],
                completed=self.completed(),
                version=pevdn.__version__,
                protocol=PROTOCOL,
                agreement=canonical(self.roster.agreement),
                clock=self._said_at,
                started=self.started,
                mask_key=self.mask_key,
            ),
        )

    # ---- talking ------------------------------------------------------------------------------

    async def tell(self, names: Iterable[str], round: int, **body: Any) -> None:
        """Say the same to each of them; returns when all have it."""
        await self.tell_each({name: body for name in names}, round)

    async def tell_each(self, bodies: dict[str, dict[str, Any]], round: int) -> None:
        """Say something to each of them; returns when all have it."""
        if not bodies:
            return
        deadline = self._deadline()
        sending = {
            name: asyncio.create_task(
                self.transport.send(name, self._envelope(round, **body), until=deadline)
            )
            for name, body in bodies.items()
        }
        try:
            while not all(task.done() for task in sending.values()):
                self._check_changed()
                self._check_left()
                self.waiting_for = [name for name, task in sending.items() if not task.done()]
                await self._more_news(deadline, extra=sending.values())
            for name, task in sending.items():
                receipt = task.result()
                if receipt.status == wire.REFUSED:
                    self._check_changed()
                    raise Stopped(
                        f"{name} refused what {self.me} said in round {round}: {receipt.reason}."
                    )
        except Unreachable as problem:
            raise self._missing([problem.name]) from None
        finally:
            self.waiting_for = []
            for task in sending.values():
                task.cancel()

    async def hear(
        self, names: Iterable[str], round: int, kind: str, step: int = 0
    ) -> dict[str, Any]:
        """What each of them says in a round."""
        wanted = {name: (round, kind, name, step) for name in names}
        deadline = self._deadline()
        try:
            while True:
                self._check_changed()
                self.waiting_for = [n for n, slot in wanted.items() if slot not in self._box]
                if not self.waiting_for:
                    return {name: self._box[slot] for name, slot in wanted.items()}
                self._check_left()
                await self._more_news(deadline)
        finally:
            self.waiting_for = []

    async def hear_any(self, names: Iterable[str], kind: str) -> tuple[int, Any] | None:
        """The first round that one of them says something of a kind in; None once all are done.

        They are silent while they wait for one of them, and say so when they give up.
        """
        names = list(names)
        deadline = time.monotonic() + 2 * self.roster.patience
        while True:
            self._check_changed()
            self._check_left()
            slots = [slot for slot in self._box if slot[1] == kind and slot[0] > self.completed()]
            if slots:
                return min(slots)[0], self._box[min(slots)]
            if self.all_done(names):
                return None
            if time.monotonic() > deadline:
                raise self._missing([name for name in names if self.left.get(name) != DONE])
            await self._pause(deadline)

    async def swap(
        self, names: Iterable[str], round: int, kind: str, **body: Any
    ) -> dict[str, Any]:
        """Tell all of them something and hear the like from each."""
        names = list(names)
        _, heard = await _together(self.tell(names, round, **body), self.hear(names, round, kind))
        found: dict[str, Any] = heard
        return found

    def forget(self, before: int) -> None:
        """Drop what was said in rounds that nobody can ask about any more."""
        for name in [name for name in self._box if name[0] < before]:
            del self._box[name]

    async def part(self, names: Iterable[str]) -> bool:
        """Say that this member is done, and wait until the others are; whether they all were.

        Who missed the end of the last round may come back and ask what came out of it.
        """
        await self.say_farewell(DONE, self.roster.patience)
        deadline = self._deadline()
        while missing := [name for name in names if self.left.get(name) != DONE]:
            self._check_changed()
            self.waiting_for = missing
            if time.monotonic() > deadline:
                break
            await self._pause(deadline)
        self.waiting_for = []
        return not missing

    async def say_farewell(self, reason: str, seconds: float) -> None:
        """Tell all that can be reached that this member stops, and why."""
        until = time.monotonic() + seconds
        envelope = self._envelope(0, farewell=wire.Farewell(reason=reason))
        sends = [self.transport.send(name, envelope, until=until) for name in self.others]
        await asyncio.gather(*sends, return_exceptions=True)

    # ---- waiting ------------------------------------------------------------------------------

    def _envelope(self, round: int, **body: Any) -> wire.Envelope:
        return wire.Envelope(
            run=self.roster.run,
            view=self.view or NOWHERE,
            round=round,
            sender=self.me,
            **body,
        )

    def _deadline(self) -> float:
        return time.monotonic() + self.roster.patience

    def interrupt(self) -> None:
        """Stop at the next moment where nothing is half done."""
        self._interrupted = True
        self._wake()

    def _check_changed(self) -> None:
        if self._interrupted:
            raise Interrupted(
                f"{self.me} was stopped; everything is saved, and the same command goes on."
            )
        if self._changed:
            raise ViewChanged

    def _check_left(self) -> None:
        """Without one of them nobody goes on."""
        for problem in self.unlike.values():
            raise Stopped(problem)
        for name, reason in self.left.items():
            if reason != DONE:
                raise Left(f"{name} has stopped: {reason}")

    async def _more_news(self, deadline: float, extra: Iterable[asyncio.Task[Any]] = ()) -> None:
        if time.monotonic() > deadline:
            await self._give_up(list(self.waiting_for))
        await self._pause(deadline, extra)

    async def _give_up(self, names: list[str]) -> NoReturn:
        """Name who is missing: of those waited for, some may only wait for another themselves."""
        until = time.monotonic() + ASKING
        asked = [self.transport.send(name, self._hello(), until=until) for name in names]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        gone = [n for n, a in zip(names, answers, strict=True) if isinstance(a, BaseException)]
        while True:
            self._check_changed()
            self._check_left()
            if gone or time.monotonic() > until + 2 * ASKING:
                raise self._missing(gone or names)
            await self._pause(until + 2 * ASKING)  # they will say whom they miss

    async def _pause(self, deadline: float, extra: Iterable[asyncio.Task[Any]] = ()) -> None:
        """Until something was heard or a task has ended, or a while has passed."""
        waiting = [task for task in extra if not task.done()]
        news = asyncio.get_running_loop().create_future()
        self._listening.add(news)
        seconds = min(1.0, max(0.0, deadline - time.monotonic()) + 0.01)
        try:
            await asyncio.wait(
                [news, *waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self._listening.discard(news)

    def _wake(self) -> None:
        """Whoever pauses looks again."""
        for news in self._listening:
            if not news.done():
                news.set_result(None)

    def _missing(self, names: Iterable[str]) -> Stopped:
        told = " and ".join(names) or "nobody"
        return Stopped(
            f"{told} did not answer for {self.roster.patience:g} seconds; everything is saved. "
            f"Start {told} again, then {self.me} with the same command."
        )

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all; if one fails the others are given up."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _refused(reason: str) -> wire.Receipt:
    return _receipt(wire.REFUSED, reason)


def _receipt(status: wire.Status, reason: str = "") -> wire.Receipt:
    return wire.Receipt(status=status, reason=reason)
