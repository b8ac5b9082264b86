"""Claims about the wire: members get through, nobody else does, and nothing stops the server."""

import asyncio
import datetime
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from pevdn.errors import PevdnError, UsageError
from pevdn.network import transport
from pevdn.network import wire_pb2 as wire
from pevdn.network.transport import METHOD, Transport, Unreachable
from pevdn.network.wire_pb2 import Envelope, Receipt

grpc = transport.grpc  # imported there, after TLS 1.2 is switched off
RUN, VIEW = bytes(range(32)), bytes(range(16))
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Identity:
    name: str
    address: str
    certificate: bytes
    key: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        return x509.load_pem_x509_certificate(self.certificate).fingerprint(hashes.SHA256()).hex()


@dataclass(frozen=True)
class Roster:
    members: tuple[Identity, ...]
    run: bytes = RUN

    def __getitem__(self, name: str) -> Identity:
        return next(member for member in self.members if member.name == name)


class Authority:
    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the authority")])

    def issue(self, name: str, *, expired: bool = False, key: Any = None) -> Identity:
        key = key or ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 3 * DAY)
            .not_valid_after(NOW - DAY if expired else NOW + DAY)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        return Identity(name, address, certificate.public_bytes(Encoding.PEM), private)


AUTHORITY = Authority()


def team(*names: str) -> Roster:
    return Roster(tuple(AUTHORITY.issue(name) for name in names or ("alice", "bob", "carol")))


class Inbox:
    """Takes everything, and keeps it."""

    def __init__(self) -> None:
        self.seen: list[Envelope] = []

    def __call__(self, envelope: Envelope) -> Receipt:
        self.seen.append(envelope)
        return Receipt(status=wire.ACCEPTED)


def member(
    roster: Roster, name: str, receive: Callable[[Envelope], Receipt] | None = None, **options: Any
) -> Transport:
    return Transport(roster, name, roster[name].key, receive or Inbox(), **options)


@asynccontextmanager
async def running(*transports: Transport) -> AsyncIterator[None]:
    try:
        for one in transports:
            await one.start()
        yield
    finally:
        for one in transports:
            await one.stop(0)


def share(words: bytes = b"\1\2\3\4", **changed: Any) -> Envelope:
    fields = {"run": RUN, "view": VIEW, "round": 7, "sender": "alice"} | changed
    return Envelope(**fields, share=wire.Share(words=words))


def hello(**changed: Any) -> Envelope:
    said: dict[str, Any] = {"incarnation": VIEW, "names": ["alice"], "incarnations": [VIEW]}
    return Envelope(run=RUN, sender="alice", hello=wire.Hello(**said | changed))


def within(seconds: float) -> float:
    return time.monotonic() + seconds


async def call(
    to: Identity, data: bytes, me: Identity | None, *, method: str = METHOD, **options: Any
) -> bytes:
    """One Deliver, past all that Transport sees to: any bytes, any certificate."""
    credentials = grpc.ssl_channel_credentials(to.certificate, me and me.key, me and me.certificate)
    target = (("grpc.ssl_target_name_override", to.name), ("grpc.enable_http_proxy", 0))
    async with grpc.aio.secure_channel(to.address, credentials, options=target) as channel:
        return await channel.unary_unary(method)(data, timeout=10, **options)


def hanging() -> tuple[asyncio.Event, Callable[[bytes], Any]]:
    """An answer that never comes, and the event of its being asked for."""
    arrived = asyncio.Event()

    async def never(_: bytes) -> bytes:
        arrived.set()
        await asyncio.sleep(60)
        return b""

    return arrived, never


@asynccontextmanager
async def stand_in(
    at: Identity, identity: Identity, answer: Callable[[bytes], Any]
) -> AsyncIterator[None]:
    """A server at somebody's address that is not a Transport, and asks no client who it is."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, _: Any) -> Any:
            async def handle(data: bytes, _: Any) -> bytes:
                said = answer(data)
                return await said if asyncio.iscoroutine(said) else said

            return grpc.unary_unary_rpc_method_handler(handle)

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((Handler(),))
    pair = [(identity.key, identity.certificate)]
    assert server.add_secure_port(at.address, grpc.ssl_server_credentials(pair))
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


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
            with pytest.raises(Unreachable, match=r"'bob' took no message for 0\.\d s") as caught:
                await alice.send("bob", share(), until=within(0.5))
            assert 0.5 <= time.monotonic() - began < 2
            assert caught.value.name == "bob" and caught.value.seconds >= 0.5
            assert "refused" in str(caught.value)  # says what it was
            talk = alice.counters.talks["bob"]
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
                with pytest.raises(PevdnError, match="hung up"):
                    await asyncio.wait_for(sending, 5)

    asyncio.run(story())


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
    assert alice._who({"x509_pem_cert": [pem]}) == ""
    assert alice._who({}) == ""
    assert alice._admit("", share().SerializeToString())[1] == (
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
            assert bob.counters.refused == {"the sender is not the one of the certificate": 4}
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


def wrong() -> dict[str, tuple[bytes, str]]:
    """Messages of alice's that are not to the schema, and a word of why they are refused."""
    late = share().SerializeToString()
    inner = share()
    inner.share.words = b""
    unknown = b"\xfa\x3f\x01x"  # field 1023
    nested = inner.SerializeToString().replace(b"\xb2\x01\x00", b"\xb2\x01\x04" + unknown)
    assert nested.endswith(unknown)

    def body(**said: Any) -> bytes:
        return Envelope(run=RUN, view=VIEW, round=1, sender="alice", **said).SerializeToString()

    def greeting(**changed: Any) -> bytes:
        return hello(**changed).SerializeToString()

    seen_off = hello()
    seen_off.view = VIEW
    return {
        "another run": (share(run=bytes(32)).SerializeToString(), "run"),
        "no run": (share(run=b"").SerializeToString(), "run"),
        "unknown field": (late + unknown, "unknown"),
        "unknown field inside": (nested, "unknown"),
        "field said twice": (late + late, "repeated"),
        "no body": (body(), "body"),
        "empty": (b"", "sender"),
        "not protobuf": (b"\xff" * 20, "envelope"),
        "not UTF-8": (late.replace(b"alice", b"ali\xffe"), "envelope"),
        "short view": (share(view=VIEW[1:]).SerializeToString(), "view"),
        "no view": (share(view=b"").SerializeToString(), "view"),
        "view in a hello": (seen_off.SerializeToString(), "view"),
        "long run in a hello": (greeting().replace(RUN, RUN + b"x").replace(b"\n ", b"\n!"), "run"),
        "incarnation": (greeting(incarnation=b"1"), "hello.incarnation"),
        "one of the incarnations": (
            greeting(names=["alice", "bob"], incarnations=[VIEW, b""]),
            "hello.incarnations",
        ),
        "names without incarnations": (greeting(names=["alice", "bob"]), "hello.incarnations"),
        "mask key": (greeting(mask_key=bytes(31)), "hello.mask_key"),
        "commitment": (
            body(stored=wire.Stored(commitment=bytes(31), facts=bytes(32))),
            "stored.commitment",
        ),
        "facts": (body(stored=wire.Stored(commitment=bytes(32))), "stored.facts"),
        "nonce": (body(reveal=wire.Reveal(nonce=bytes(33))), "reveal.nonce"),
        "digest": (body(sum_digest=wire.SumDigest(digest=b"x")), "sum_digest.digest"),
        "words": (share(b"12345").SerializeToString(), "share.words"),
        "partial words": (body(partial_sum=wire.PartialSum(words=b"1")), "partial_sum.words"),
        "masked words": (body(masked=wire.Masked(words=b"12")), "masked.words"),
        "plain words": (body(plain=wire.Plain(words=b"123")), "plain.words"),
        "recalled words": (body(recalled=wire.Recalled(words=b"1")), "recalled.words"),
        "recalled nonces": (
            body(recalled=wire.Recalled(names=["bob"], nonces=[b"1"])),
            "recalled.nonces",
        ),
        "observations": (body(sight=wire.Sight(observations=b"1")), "sight.observations"),
        "rewards": (body(sight=wire.Sight(rewards=b"1")), "sight.rewards"),
        "actions": (body(choice=wire.Choice(actions=b"1")), "choice.actions"),
    }


def test_what_is_not_to_the_schema_is_refused_and_counted_by_reason() -> None:
    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice, bob):
            for name, (data, why) in wrong().items():
                receipt = Receipt.FromString(await call(roster["bob"], data, roster["alice"]))
                assert receipt.status == wire.REFUSED, name
                assert why in receipt.reason, name
            assert inbox.seen == []
            assert sum(bob.counters.refused.values()) == len(wrong()) == bob.counters.calls
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())


def test_every_kind_of_message_gets_through() -> None:
    words, bits = bytes(8), bytes(32)
    said: list[dict[str, Any]] = [
        {"stored": wire.Stored(commitment=bits, facts=bits)},
        {"reveal": wire.Reveal(nonce=bits)},
        {"share": wire.Share(words=words)},
        {"partial_sum": wire.PartialSum(words=words)},
        {"masked": wire.Masked(words=words)},
        {"plain": wire.Plain(words=words)},
        {"sum_digest": wire.SumDigest(digest=bits)},
        {"recall": wire.Recall()},
        {"recalled": wire.Recalled(words=words, names=["bob"], nonces=[bits])},
        {"ready": wire.Ready(purpose=wire.TRAIN, episodes=8, number=3)},
        {
            "sight": wire.Sight(
                step=1, observations=words, available=b"1", rewards=words, flags=b"1"
            )
        },
        {"choice": wire.Choice(step=1, actions=words)},
        {"farewell": wire.Farewell(reason="done")},
    ]
    envelopes = [Envelope(run=RUN, view=VIEW, round=1, sender="alice", **body) for body in said]
    stranger = hello(mask_key=bits)
    stranger.run = bytes(32)  # of another agreement: compared in words, by whoever receives it
    envelopes += [hello(), stranger]
    assert {envelope.WhichOneof("body") for envelope in envelopes} == {
        field.name for field in Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
    }

    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice, bob):
            for envelope in envelopes:
                receipt = await alice.send("bob", envelope, until=within(10))
                assert receipt == Receipt(status=wire.ACCEPTED), envelope
        assert inbox.seen == envelopes

    asyncio.run(story())


def test_whatever_a_member_sends_the_server_answers_and_goes_on() -> None:
    chance = random.Random(2)
    good = [share(chance.randbytes(400)), hello(agreement="{}", version="1")]
    good.append(Envelope(run=RUN, view=VIEW, round=2, sender="alice", recall=wire.Recall()))

    def mutated() -> bytes:
        data = bytearray(chance.choice(good).SerializeToString())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at:at] = chance.randbytes(chance.randint(1, 20))
                case 2:
                    del data[at : at + chance.randint(1, 20)]
                case 3:
                    data[at:] = data[: chance.randrange(len(data))]
            data = data or bytearray(1)
        return bytes(data)

    cases = [chance.randbytes(chance.randrange(500)) for _ in range(150)]
    cases += [mutated() for _ in range(350)]

    async def story() -> None:
        roster, inbox = team(), Inbox()
        alice, bob = member(roster, "alice"), member(roster, "bob", inbox)
        async with running(alice, bob):
            deliver = alice._calls["bob"]
            for data in cases:
                receipt = Receipt.FromString(await deliver(data, timeout=10))
                assert receipt.status in (wire.ACCEPTED, wire.REFUSED)
            for envelope in inbox.seen:
                assert envelope.sender == "alice" and len(envelope.run) == 32
                assert envelope.run == RUN or envelope.HasField("hello")
            assert sum(bob.counters.answered.values()) == len(cases)
            assert len(bob.counters.refused) >= 4
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())


def test_a_receiver_that_fails_refuses_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox()

    def fragile(envelope: Envelope) -> Receipt:
        if envelope.round == 13:
            raise ValueError("secret words")
        return inbox(envelope)

    async def story() -> None:
        roster = team()
        alice, bob = member(roster, "alice"), member(roster, "bob", fragile)
        async with running(alice, bob):
            receipt = await alice.send("bob", share(round=13), until=within(10))
            assert receipt == Receipt(status=wire.REFUSED, reason="the receiver failed")
            assert (await alice.send("bob", share(), until=within(10))).status == wire.ACCEPTED

    asyncio.run(story())
    assert "a message of 'alice' could not be handled" in caplog.text


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
        there, here = alice.counters.talks["bob"], bob.counters.talks["alice"]
        assert (there.messages_sent, there.bytes_sent) == (6, sizes)
        assert (here.messages_received, here.bytes_received) == (6, sizes)
        assert 0 < there.seconds < 10
        assert bob.counters.calls == 6
        assert bob.counters.answered == {("ACCEPTED", ""): 5, ("REFUSED", "another run"): 1}
        assert bob.counters.refused == {"another run": 1}

    asyncio.run(story())


def test_reasons_without_end_are_counted_together_in_the_end() -> None:
    counters = transport.Counters()
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
    with pytest.raises(UsageError, match="certificate of 'bob' is not the one"):
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
