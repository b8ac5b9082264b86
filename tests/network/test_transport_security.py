"""Who is let in: pinned certificates, TLS 1.3, and limits for strangers."""

import asyncio
import random
import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from network_wire import (
    AUTHORITY,
    Authority,
    Identity,
    Inbox,
    Roster,
    call,
    member,
    running,
    share,
    stand_in,
    team,
    within,
)

from pevdn.network import transport
from pevdn.network import wire_pb2 as wire
from pevdn.network.transport import Unreachable
from pevdn.network.wire_pb2 import Receipt

grpc = transport.grpc  # imported there, after TLS 1.2 is switched off


STRANGER = AUTHORITY.issue("mallory")
NAMESAKE = AUTHORITY.issue("alice")  # the right name from the right authority, another key
FOREIGNER = Authority().issue("alice")
BYGONE = AUTHORITY.issue("dave", expired=True)


@pytest.mark.parametrize(
    "intruder",
    [None, FOREIGNER, BYGONE, STRANGER, NAMESAKE],
    ids=["no certificate", "another authority", "expired", "not in the roster", "namesake"],
)
def test_who_has_not_the_pinned_certificate_is_refused(intruder: Identity | None) -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        roster = replace(roster, members=(*roster.members, BYGONE))  # pinned, but over
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice, bob):
            for name in ("alice", intruder.name if intruder else "bob"):
                data = share(sender=name).SerializeToString()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(roster["bob"], data, intruder)
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert inbox.seen == [] and bob.counters.calls == 0
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())


def test_a_certificate_that_the_handshake_let_through_is_still_compared() -> None:
    alice = member(team(), "alice")
    pem = STRANGER.certificate
    assert alice._authenticate({"x509_pem_cert": [pem]}) == ""
    assert alice._authenticate({}) == ""
    assert alice._parse("", share().SerializeToString())[1] == (
        "the certificate is not in the roster"
    )


def test_a_member_cannot_send_in_the_name_of_another() -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob, carol = (member(roster, name, inbox) for name in ("alice", "bob", "carol"))
        async with running(alice, bob, carol):
            for name in ("alice", "bob", "nobody", ""):
                receipt = await carol.send("bob", share(sender=name), until=within(10))
                assert receipt.status == wire.REFUSED and "sender" in receipt.reason
            assert inbox.seen == []
            assert bob.counters.refused == {"the sender does not match the certificate": 4}
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())


def tls(to: Identity, me: Identity, folder: Path, version: ssl.TLSVersion) -> bytes:
    """What the server says first, over TLS of this version and with the right certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=to.certificate.decode())
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    (folder / "me.pem").write_bytes(me.certificate + me.key)
    context.load_cert_chain(folder / "me.pem")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    host, port = to.address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=to.name) as secure,
    ):
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        return secure.recv(1000)


def test_there_is_tls_1_3_and_nothing_older(tmp_path: Path) -> None:
    async def story() -> None:
        roster = team()
        alice, bob = member(roster, "alice"), member(roster, "bob")
        async with running(alice, bob):

            def attempt(version: ssl.TLSVersion) -> Any:
                return asyncio.to_thread(tls, roster["bob"], roster["alice"], tmp_path, version)

            with pytest.raises(ssl.SSLError):  # it hangs up: no cipher that both have
                await attempt(ssl.TLSVersion.TLSv1_2)
            assert (await attempt(ssl.TLSVersion.TLSv1_3))[3] == 4  # a SETTINGS frame
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())


def test_a_member_does_not_talk_over_tls_1_2_either(tmp_path: Path) -> None:
    async def story(version: ssl.TLSVersion) -> bool:
        roster = team()
        bob, alice, got = roster["bob"], member(roster, "alice"), []

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            got.append(await reader.read(1000))
            writer.close()

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        (tmp_path / "bob.pem").write_bytes(bob.certificate + bob.key)
        context.load_cert_chain(tmp_path / "bob.pem")
        context.set_alpn_protocols(["h2"])
        context.maximum_version = version
        host, port = bob.address.split(":")
        server = await asyncio.start_server(listen, host, int(port), ssl=context)
        async with running(alice):
            with pytest.raises(Unreachable):
                await alice.send("bob", share(), until=within(0.7))
        server.close()
        return bool(got)

    assert asyncio.run(story(ssl.TLSVersion.TLSv1_3))
    assert not asyncio.run(story(ssl.TLSVersion.TLSv1_2))


NOISE = random.Random(1).randbytes(100_000)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: bob\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        NOISE,
        b"\x16\x03\x01\xff\xff" + NOISE,  # begins like TLS
        b"",
    ],
    ids=["http", "http/2 without TLS", "noise", "noise in TLS", "nothing"],
)
def test_who_does_not_speak_tls_gets_nothing_and_stops_nothing(said: bytes) -> None:
    def intrude(address: str) -> bytes:
        host, port = address.split(":")
        heard = b""
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            try:
                plain.sendall(said)
                plain.shutdown(socket.SHUT_WR)
                while got := plain.recv(1000):
                    heard += got
            except TimeoutError:
                raise
            except OSError:  # it hung up
                pass
        return heard

    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice, bob):
            heard = await asyncio.to_thread(intrude, roster["bob"].address)
            assert len(heard) <= 7  # at most an alert of TLS
            assert inbox.seen == [] and bob.counters.calls == 0
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())


def test_many_who_connect_and_say_nothing_keep_nobody_out() -> None:
    async def story() -> None:
        roster = team()
        alice, bob = member(roster, "alice"), member(roster, "bob")
        async with running(alice, bob):
            host, port = roster["bob"].address.split(":")
            idle = [socket.create_connection((host, int(port))) for _ in range(200)]
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED
            for one in idle:
                one.close()

    asyncio.run(story())


def refuses_too_much(size: int, compressed: bool = True) -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox, limit=2**20)
        async with running(alice, bob):
            for compression in (None, grpc.Compression.Gzip) if compressed else (None,):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(roster["bob"], bytes(size), roster["alice"], compression=compression)
                assert caught.value.code() in (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.UNIMPLEMENTED,  # compressed
                )
            assert inbox.seen == [] and not bob.counters.answered
            assert bob.counters.calls >= 1
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())


def test_64_megabytes_are_refused_unread() -> None:
    refuses_too_much(64 * 2**20)


@pytest.mark.slow
def test_a_gigabyte_is_refused_unread() -> None:
    refuses_too_much(2**30, compressed=False)


def test_a_message_over_the_limit_is_refused_at_once_and_one_below_arrives() -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox, limit=2**20)
        async with running(alice, bob):
            receipt = await alice.send("bob", share(bytes(2**20)), until=within(10))
            assert receipt.status == wire.REFUSED and "RESOURCE_EXHAUSTED" in receipt.reason
            assert inbox.seen == []
            receipt = await alice.send("bob", share(bytes(2**20 - 100)), until=within(10))
            assert receipt.status == wire.ACCEPTED

    asyncio.run(story())


@pytest.mark.parametrize(
    "impostor",
    [AUTHORITY.issue("bob"), Authority().issue("bob"), STRANGER],
    ids=["same authority", "another authority", "another name"],
)
def test_an_impostor_at_the_address_of_a_member_gets_nothing(impostor: Identity) -> None:
    async def story() -> None:
        roster, got, inbox = team(), [], Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)

        def take(data: bytes) -> bytes:
            got.append(data)
            return Receipt(status=wire.ACCEPTED).SerializeToString()

        async with running(alice):
            async with stand_in(roster["bob"], impostor, take):
                with pytest.raises(Unreachable, match=r"(?i)certificate|handshake|peer"):
                    await alice.send("bob", share(), until=within(0.7))
            assert got == []
            async with running(bob):
                receipt = await alice.send("bob", share(), until=within(10))
            assert receipt.status == wire.ACCEPTED and len(inbox.seen) == 1

    asyncio.run(story())


def test_a_member_at_the_address_of_another_gets_nothing() -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice = member(roster, "alice")
        carol = member(roster, "carol", inbox, listen=roster["bob"].address)
        async with running(alice, carol):
            with pytest.raises(Unreachable, match="bob"):
                await alice.send("bob", share(), until=within(0.5))
        assert inbox.seen == [] and carol.counters.calls == 0

    asyncio.run(story())


def test_a_server_whose_certificate_has_expired_gets_nothing() -> None:
    async def story() -> None:
        roster, got = Roster((AUTHORITY.issue("alice"), BYGONE)), []
        alice = member(roster, "alice")
        async with running(alice), stand_in(BYGONE, BYGONE, lambda data: got.append(data) or b""):
            with pytest.raises(Unreachable, match="dave"):
                await alice.send("dave", share(), until=within(0.5))
        assert got == []

    asyncio.run(story())
