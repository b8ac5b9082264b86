"""Transports of a small team with its own certificates, and calls past them."""

import asyncio
import datetime
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from pevdn.network import transport
from pevdn.network import wire_pb2 as wire
from pevdn.network.transport import METHOD, Transport
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
    fields = {"run": RUN, "view": VIEW, "step": 7, "sender": "alice"} | changed
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
