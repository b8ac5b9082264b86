"""Delivery: messages arrive, receipts come back, and nothing stops the server."""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from network_wire import (
    AUTHORITY,
    Identity,
    Inbox,
    Roster,
    call,
    hanging,
    member,
    running,
    share,
    stand_in,
    team,
    within,
)

from pevdn.errors import PevdnError, UsageError
from pevdn.network import transport
from pevdn.network import wire_pb2 as wire
from pevdn.network.traffic import Counters
from pevdn.network.transport import Transport, Unreachable
from pevdn.network.wire_pb2 import Envelope, Receipt

grpc = transport.grpc  # imported there, after TLS 1.2 is switched off


def test_a_message_arrives_once_and_its_receipt_comes_back() -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice, bob):
            receipt = await alice.send("bob", share(), until=within(10))
        assert receipt == Receipt(status=wire.ACCEPTED)
        assert inbox.seen == [share()]

    asyncio.run(story())


@pytest.mark.parametrize("status", [wire.DUPLICATE, wire.REFUSED])
def test_what_the_receiver_says_is_what_the_sender_hears(status: int) -> None:
    said = Receipt(status=status, reason="because")

    async def story() -> None:
        roster = team()
        alice, bob = member(roster, "alice"), member(roster, "bob", lambda _: said)
        async with running(alice, bob):
            assert await alice.send("bob", share(), until=within(10)) == said
        assert bob.counters.answered == {(wire.Status.Name(status), "because"): 1}

    asyncio.run(story())


def test_a_message_to_a_member_that_is_down_arrives_soon_after_it_comes_up() -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice):
            sending = asyncio.create_task(alice.send("bob", share(), until=within(20)))
            await asyncio.sleep(2)  # the pauses have grown
            assert not sending.done()
            async with running(bob):
                came_up = time.monotonic()
                assert (await sending).status == wire.ACCEPTED
                assert time.monotonic() - came_up < 2  # alone on a machine: less than one
            again = member(roster, "bob", inbox)
            sending = asyncio.create_task(alice.send("bob", share(), until=within(20)))
            async with running(again):  # at the same port
                assert (await sending).status == wire.ACCEPTED
        assert len(inbox.seen) == 2

    asyncio.run(story())


def test_once_the_deadline_has_passed_the_member_is_unreachable_by_name() -> None:
    async def story() -> None:
        alice = member(team(), "alice")
        async with running(alice):
            began = time.monotonic()
            with pytest.raises(
                Unreachable, match=r"'bob' accepted no message for 0\.\d s"
            ) as caught:
                await alice.send("bob", share(), until=within(0.5))
            assert 0.5 <= time.monotonic() - began < 2
            assert caught.value.name == "bob" and caught.value.seconds >= 0.5
            assert "refused" in str(caught.value)  # says what it was
            talk = alice.counters.peers["bob"]
            assert talk.failed > 1 and talk.messages_sent == talk.bytes_sent == 0
            with pytest.raises(Unreachable):
                await alice.send("bob", share(), until=within(-1))

    asyncio.run(story())


def test_a_receiver_that_does_not_answer_is_unreachable_too() -> None:
    async def story() -> None:
        roster = team()
        alice = member(roster, "alice")

        async def never(_: bytes) -> bytes:
            await asyncio.sleep(60)
            return b""

        async with running(alice), stand_in(roster["bob"], roster["bob"], never):
            with pytest.raises(Unreachable, match="bob"):
                await alice.send("bob", share(), until=within(0.5))

    asyncio.run(story())


def test_later_is_asked_again_until_it_is_accepted() -> None:
    asked = []

    def reluctant(envelope: Envelope) -> Receipt:
        asked.append(envelope)
        if len(asked) < 4:
            return Receipt(status=wire.LATER, reason="not yet")
        return Receipt(status=wire.ACCEPTED)

    async def story() -> None:
        roster = team()
        alice, bob = member(roster, "alice"), member(roster, "bob", reluctant)
        async with running(alice, bob):
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED
            asked[:] = []
            with pytest.raises(Unreachable, match="LATER: not yet"):
                await alice.send("bob", share(), until=within(0.04))
        assert bob.counters.answered["ACCEPTED", ""] == 1
        assert bob.counters.answered["LATER", "not yet"] >= 4

    asyncio.run(story())


def test_sending_can_be_cancelled_at_any_moment() -> None:
    async def story() -> None:
        roster, (arrived, never) = team(), hanging()
        alice = member(roster, "alice")

        async def cancel(sending: asyncio.Task[Receipt]) -> None:
            began = time.monotonic()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert time.monotonic() - began < 1

        async with running(alice):
            sending = asyncio.create_task(alice.send("carol", share(), until=None))
            await asyncio.sleep(0.3)
            await cancel(sending)  # in a pause
            async with stand_in(roster["bob"], roster["bob"], never):
                sending = asyncio.create_task(alice.send("bob", share(), until=None))
                await asyncio.wait_for(arrived.wait(), 10)
                await cancel(sending)  # in a call

    asyncio.run(story())


def test_who_hangs_up_ends_what_it_was_sending() -> None:
    async def story() -> None:
        roster, (arrived, never) = team(), hanging()
        alice = member(roster, "alice")

        async with running(alice), stand_in(roster["bob"], roster["bob"], never):
            called = asyncio.create_task(alice.send("bob", share(), until=None))
            paused = asyncio.create_task(alice.send("carol", share(), until=None))
            await asyncio.wait_for(arrived.wait(), 10)
            await alice.stop()
            for sending in (called, paused):
                with pytest.raises(PevdnError, match=r"disconnected|not connected"):
                    await asyncio.wait_for(sending, 5)

    asyncio.run(story())


def test_an_answer_that_is_no_receipt_counts_as_refused() -> None:
    async def story() -> None:
        roster = team()
        alice, answers = member(roster, "alice"), [b"", b"\xff\xff", b"\x08\x63", bytes(2**17)]
        async with (
            running(alice),
            stand_in(roster["bob"], roster["bob"], lambda _: answers.pop(0)),
        ):
            while answers:
                receipt = await alice.send("bob", share(), until=within(10))
                assert receipt.status == wire.REFUSED and receipt.reason

    asyncio.run(story())


def test_a_receiver_that_fails_refuses_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox()

    def fragile(envelope: Envelope) -> Receipt:
        if envelope.step == 13:
            raise ValueError("secret words")
        return inbox(envelope)

    async def story() -> None:
        roster = team()
        alice, bob = member(roster, "alice"), member(roster, "bob", fragile)
        async with running(alice, bob):
            receipt = await alice.send("bob", share(step=13), until=within(10))
            assert receipt == Receipt(status=wire.REFUSED, reason="the receiver failed")
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())
    assert "failed to handle a message of 'alice'" in caplog.text


def test_there_is_no_other_method() -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        bob = member(roster, "bob", inbox)
        async with running(bob):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                data = share().SerializeToString()
                await call(roster["bob"], data, roster["alice"], method="/pevdn.Member/Other")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED and inbox.seen == []

    asyncio.run(story())


def test_the_tap_sees_exactly_the_bytes_that_leave() -> None:
    async def story() -> None:
        roster, tapped, arrived = team(), [], []
        alice = member(roster, "alice", tap=lambda to, data: tapped.append((to, data)))
        receipts = [Receipt(status=wire.LATER), Receipt(status=wire.ACCEPTED)]

        def take(data: bytes) -> bytes:
            arrived.append(("bob", data))
            return receipts.pop(0).SerializeToString()

        async with running(alice):
            async with stand_in(roster["bob"], roster["bob"], take):
                await alice.send("bob", share(), until=within(10))
            assert tapped == arrived == [("bob", share().SerializeToString())] * 2
            answer = await call(roster["alice"], b"noise", roster["carol"])
        assert tapped[2:] == [("carol", answer)]  # receipts leave, too

    asyncio.run(story())


def test_counters_count() -> None:
    async def story() -> None:
        roster = team()
        alice, bob = member(roster, "alice"), member(roster, "bob")
        sizes = 0
        async with running(alice, bob):
            for n in range(5):
                envelope = share(bytes(4 * n))
                sizes += envelope.ByteSize()
                await alice.send("bob", envelope, until=within(10))
            await alice.send("bob", share(run=bytes(32)), until=within(10))
            sizes += share().ByteSize()
        there, here = alice.counters.peers["bob"], bob.counters.peers["alice"]
        assert (there.messages_sent, there.bytes_sent) == (6, sizes)
        assert (here.messages_received, here.bytes_received) == (6, sizes)
        assert 0 < there.seconds < 10
        assert bob.counters.calls == 6
        assert bob.counters.answered == {("ACCEPTED", ""): 5, ("REFUSED", "another run"): 1}
        assert bob.counters.refused == {"another run": 1}

    asyncio.run(story())


def test_reasons_without_end_are_counted_together_in_the_end() -> None:
    counters = Counters()
    for n in range(10_000):
        counters.answer(Receipt(status=wire.LATER, reason=str(n)))
    assert len(counters.answered) <= 300
    assert sum(counters.answered.values()) == 10_000


def test_an_address_that_is_taken_is_one_sentence() -> None:
    async def story() -> None:
        roster = team()
        bob, twin = member(roster, "bob"), member(roster, "bob")
        async with running(bob):
            with pytest.raises(PevdnError, match=f"'bob' cannot listen at {roster['bob'].address}"):
                await twin.start()

    asyncio.run(story())


def test_a_roster_that_cannot_be_pinned_is_refused() -> None:
    roster = team("alice", "bob")
    with pytest.raises(UsageError, match="unknown member 'alcie'; did you mean 'alice'"):
        Transport(roster, "alcie", b"", Inbox())
    weak = AUTHORITY.issue("carol", key=rsa.generate_private_key(65537, 2048))
    with pytest.raises(UsageError, match="certificate of 'carol' has no ECDSA key"):
        member(Roster((*roster.members, weak)), "alice")

    class Mistaken(Identity):
        fingerprint = "0" * 64

    bob = roster["bob"]
    mistaken = Mistaken(bob.name, bob.address, bob.certificate, bob.key)
    with pytest.raises(UsageError, match="certificate of 'bob' does not have the fingerprint"):
        member(Roster((roster["alice"], mistaken)), "alice")

    async def story() -> None:
        alice = member(roster, "alice")
        for name in ("alice", "dave"):
            with pytest.raises(UsageError, match="unknown member"):
                await alice.send(name, share(), until=None)
        with pytest.raises(PevdnError, match="start"):
            await alice.send("bob", share(), until=None)

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [0, 1])  # seconds; at first gRPC has pings of its own under way
def test_a_peer_that_is_gone_without_a_word_is_noticed(quiet: float) -> None:
    """A cable is pulled: nothing comes any more on the old connection, a new one works."""

    async def story() -> None:
        roster, lines, cut = team(), [], asyncio.Event()
        host, port = roster["bob"].address.split(":")

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = object()
            lines.append(line)
            back, forth = await asyncio.open_connection(host, int(port))

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    if not (cut.is_set() and line is lines[0]):
                        sink.write(data)

            with suppress(ConnectionError, asyncio.CancelledError):
                await asyncio.gather(pump(reader, forth), pump(back, writer))

        proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
        detour = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        alice = member(Roster((roster["alice"], replace(roster["bob"], address=detour))), "alice")
        bob = member(roster, "bob")
        async with running(alice, bob):
            await alice.send("bob", share(), until=within(10))
            await asyncio.sleep(quiet)
            cut.set()
            began = time.monotonic()
            await alice.send("bob", share(), until=within(50))
            assert 5 < time.monotonic() - began < 30
        assert len(lines) == 2
        proxy.close()

    asyncio.run(story())
