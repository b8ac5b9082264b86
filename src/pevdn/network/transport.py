"""Who may talk, what may be said, and that it arrives.

One call, Deliver, over mutual TLS 1.3. Both ends know the other's certificate beforehand and take
no other, whoever signed it: the server trusts the certificates of the roster and nothing above
them, and compares the one it sees with the one of the sender that the message names; the client
trusts the certificate of the one member it wants to reach. So nothing is sent to, and nothing is
taken from, anybody else. What is not an `Envelope` of this run, to the letter of the schema, is
refused before the rest of the program sees it.

A message may arrive more than once, if the receipt of it was lost, and in another order than it
was sent. Whoever gives `receive` tells duplicates apart.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import ssl
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import DecodeError

from pevdn.errors import PevdnError, UsageError, unknown

# Of TLS 1.2, only a suite that needs an RSA key. Members have ECDSA keys, so there is only TLS 1.3.
# gRPC has no other way to say so, and reads this once.
_SUITES = "ECDHE-RSA-AES256-GCM-SHA384"
if "grpc" in sys.modules and os.environ.get("GRPC_SSL_CIPHER_SUITES") != _SUITES:
    raise PevdnError(
        "grpc was imported before pevdn.network.transport, which is too late to switch "
        f"TLS 1.2 off; import it afterwards, or set GRPC_SSL_CIPHER_SUITES={_SUITES}."
    )
os.environ["GRPC_SSL_CIPHER_SUITES"] = _SUITES

import grpc  # noqa: E402
import grpc.aio  # noqa: E402

from pevdn.network.wire_pb2 import LATER, NOTHING, REFUSED, Envelope, Receipt, Status  # noqa: E402

METHOD = "/pevdn.Member/Deliver"
LIMIT = 64 * 2**20  # bytes of a message

ATTEMPT = 60.0  # seconds after which a call without an answer is made again
FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 0.02, 0.5, 1.5  # seconds between two attempts
_RECEIPT_LIMIT = 2**16  # bytes
_MOST_REASONS = 256  # that are counted one by one

_EVERYWHERE = (
    # A peer that is gone without a word is noticed within about 20 seconds. gRPC pings to measure
    # the line, too, and while such a ping is out, its timeout is the one that counts.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Compressed messages could be small on the wire and huge in memory.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
)
_SERVER = (
    *_EVERYWHERE,
    ("grpc.so_reuseport", 0),  # nobody else binds to our port, and we to nobody else's
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 256),
)
_CLIENT = (
    *_EVERYWHERE,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 400),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # the time that one attempt to connect may take
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.max_receive_message_length", _RECEIPT_LIMIT),
)
# What another attempt will not change.
_FINAL = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}

_VIEW = {"hello": 0}  # bytes; 16 in all others
# Bytes that a field, or each entry of it, may have.
_EXACTLY: dict[str, dict[str, tuple[int, ...]]] = {
    "hello": {"incarnation": (16,), "incarnations": (16,), "mask_key": (0, 32)},
    "stored": {"commitment": (32,), "facts": (32,)},
    "reveal": {"nonce": (32,)},
    "sum_digest": {"digest": (32,)},
    "recalled": {"nonces": (32,)},
}
# Bytes of one entry of an array.
_ENTRIES: dict[str, dict[str, int]] = {
    "share": {"words": 4},
    "partial_sum": {"words": 4},
    "masked": {"words": 4},
    "plain": {"words": 4},
    "recalled": {"words": 4},
    "sight": {"observations": 4, "rewards": 4},
    "choice": {"actions": 2},
}
# Lists that say something of the names beside them.
_BESIDE_NAMES = {"hello": "incarnations", "recalled": "nonces"}

_log = logging.getLogger(__name__)


class Pinned(Protocol):
    """A member of the roster: its name, where it listens, and the one certificate that it has."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def certificate(self) -> bytes: ...
    @property
    def fingerprint(self) -> str: ...


class Team(Protocol):
    """What is needed of a roster."""

    @property
    def members(self) -> Sequence[Pinned]: ...
    @property
    def run(self) -> bytes: ...


class Unreachable(PevdnError):
    """A member took no message until the deadline."""

    def __init__(self, name: str, seconds: float, why: str = "") -> None:
        super().__init__(
            f"'{name}' took no message for {seconds:.1f} s{': ' + why if why else ''}; see that "
            "it runs, at the address and with the certificate that the roster says."
        )
        self.name = name
        self.seconds = seconds


@dataclass
class Talk:
    """With one member. What was sent counts once it is answered, LATER included."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    seconds: float = 0.0  # between messages and their receipts
    failed: int = 0  # attempts without a receipt


@dataclass
class Counters:
    """What a transport did so far. Handshakes that fail are seen by gRPC alone: not counted."""

    talks: defaultdict[str, Talk] = field(default_factory=lambda: defaultdict(Talk))
    calls: int = 0  # that came in; if larger than all answers, messages were too large or broke off
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)  # by status and reason

    @property
    def refused(self) -> dict[str, int]:
        """How many messages were refused, by reason."""
        return {why: n for (status, why), n in self.answered.items() if status == "REFUSED"}

    def answer(self, receipt: Receipt) -> None:
        key = (_status(receipt), receipt.reason)
        if key not in self.answered and len(self.answered) >= _MOST_REASONS:
            key = (key[0], "other")
        self.answered[key] += 1


class Transport:
    """One member's end of the wire.

    `receive` is asked about every envelope that is the sender's own, of this run (a Hello: of any)
    and to the schema; its receipt goes back. It must not block. `tap` sees every byte string that
    leaves, envelopes at every attempt and receipts, with the name of who gets it.
    """

    def __init__(
        self,
        roster: Team,
        me: str,
        key: bytes,
        receive: Callable[[Envelope], Receipt],
        *,
        listen: str | None = None,
        limit: int = LIMIT,
        tap: Callable[[str, bytes], None] | None = None,
    ) -> None:
        members = {member.name: member for member in roster.members}
        if me not in members:
            raise unknown("member", me, members)
        self.me = me
        self.counters = Counters()
        self.tap = tap
        self._run = roster.run
        self._key = key
        self._certificates = {name: _pinned(member) for name, member in members.items()}
        self._own = self._certificates.pop(me)
        self._peers = {name: member for name, member in members.items() if name != me}
        self._by_fingerprint = {m.fingerprint.lower(): name for name, m in self._peers.items()}
        self._by_certificate: dict[bytes, str] = {}
        self._receive = receive
        self._listen = listen or members[me].address
        self._limit = limit
        self._server: grpc.aio.Server | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {}

    async def start(self) -> None:
        """Listen. Members need not be there yet."""
        server = grpc.aio.server(
            options=(*_SERVER, ("grpc.max_receive_message_length", self._limit))
        )
        server.add_generic_rpc_handlers((_Door(self._deliver, self.counters),))
        credentials = grpc.ssl_server_credentials(
            [(self._key, self._own)],
            root_certificates=b"".join(self._certificates.values()),
            require_client_auth=True,
        )
        try:
            bound = server.add_secure_port(self._listen, credentials)
        except RuntimeError:
            bound = 0
        if not bound:
            await server.stop(None)
            raise PevdnError(
                f"'{self.me}' cannot listen at {self._listen}; see that the address is one of this "
                "machine and that nothing else listens there."
            )
        await server.start()
        self._server = server
        for name, peer in self._peers.items():
            channel = grpc.aio.secure_channel(
                peer.address,
                grpc.ssl_channel_credentials(self._certificates[name], self._key, self._own),
                options=(*_CLIENT, ("grpc.ssl_target_name_override", name)),
            )
            self._channels[name] = channel
            self._calls[name] = channel.unary_unary(METHOD)

    async def stop(self, grace: float = 0.5) -> None:
        """Hang up. Calls that came in have `grace` seconds to be answered."""
        server, self._server = self._server, None
        channels, self._channels = self._channels, {}
        self._calls = {}
        for channel in channels.values():
            await channel.close()
        if server is not None:
            await server.stop(grace)

    async def send(self, to: str, envelope: Envelope, *, until: float | None) -> Receipt:
        """What the member says to this: ACCEPTED, DUPLICATE or REFUSED.

        Tries again as long as it cannot be reached or says LATER, until time.monotonic() has
        passed `until`; None is for ever. Then it is Unreachable.
        """
        if to not in self._peers:
            raise unknown("member", to, self._peers)
        data = envelope.SerializeToString()
        talk = self.counters.talks[to]
        began = time.monotonic()
        pause, why = FIRST_PAUSE, ""
        while True:
            now = time.monotonic()
            if until is not None and now >= until:
                raise Unreachable(to, now - began, why)
            try:
                receipt = await self._attempt(
                    to, data, ATTEMPT if until is None else min(ATTEMPT, until - now)
                )
            except grpc.aio.AioRpcError as error:
                talk.failed += 1
                why = f"{error.code().name}: {error.details()}"
                if error.code() in _FINAL:
                    return Receipt(status=REFUSED, reason=why)
            else:
                talk.messages_sent += 1
                talk.bytes_sent += len(data)
                talk.seconds += time.monotonic() - now
                if receipt.status != LATER:
                    return receipt
                why = f"LATER: {receipt.reason}"
            left = pause if until is None else min(pause, until - time.monotonic())
            await asyncio.sleep(max(left, 0.0))
            pause = min(pause * GROWTH, LONGEST_PAUSE)

    async def _attempt(self, to: str, data: bytes, timeout: float) -> Receipt:
        call = self._calls.get(to)
        if call is None:
            raise PevdnError(f"'{self.me}' has hung up; call start() before send().")
        if self.tap is not None:
            self.tap(to, data)
        try:
            answer = await call(data, timeout=timeout)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if to in self._calls or (task is not None and task.cancelling()):
                raise
            raise PevdnError(f"'{self.me}' hung up while it talked to '{to}'.") from None
        try:
            receipt = Receipt.FromString(answer)
        except DecodeError:
            receipt = Receipt()
        if receipt.status == NOTHING or receipt.status not in Status.values():
            return Receipt(status=REFUSED, reason=f"'{to}' answered with something else")
        return receipt

    async def _deliver(self, data: bytes, context: Any) -> bytes:
        """The server's side of one call. Whatever comes in, there is an answer."""
        sender = self._who(context.auth_context())
        talk = self.counters.talks[sender]
        talk.messages_received += 1
        talk.bytes_received += len(data)
        envelope, why = self._admit(sender, data)
        if why:
            receipt = Receipt(status=REFUSED, reason=why)
        else:
            try:
                receipt = self._receive(envelope)
            except Exception:
                _log.exception("a message of '%s' could not be handled", sender)
                receipt = Receipt(status=REFUSED, reason="the receiver failed")
        self.counters.answer(receipt)
        answer = receipt.SerializeToString()
        if self.tap is not None:
            self.tap(sender, answer)
        return answer

    def _who(self, auth: dict[str, Sequence[bytes]]) -> str:
        """The member whose certificate this is, or nobody."""
        certificates = auth.get("x509_pem_cert", ())
        if len(certificates) != 1:
            return ""
        pem = certificates[0]
        name = self._by_certificate.get(pem)
        if name is None:
            der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
            name = self._by_fingerprint.get(hashlib.sha256(der).hexdigest(), "")
            if name:
                self._by_certificate[pem] = name
        return name

    def _admit(self, sender: str, data: bytes) -> tuple[Envelope, str]:
        """The envelope, and why it is refused, if it is."""
        envelope = Envelope()
        if not sender:
            return envelope, "the certificate is not in the roster"
        try:
            envelope.ParseFromString(data)
        except DecodeError:
            return envelope, "not an envelope"
        if envelope.sender != sender:
            return envelope, "the sender is not the one of the certificate"
        # Shorter without what the schema does not know, or with what was said twice.
        envelope.DiscardUnknownFields()
        if envelope.ByteSize() != len(data):
            return envelope, "unknown or repeated fields"
        body = envelope.WhichOneof("body")
        if body is None:
            return envelope, "no body"
        misfit = _misfit(envelope, body)
        if misfit:
            return envelope, f"wrong length of {misfit}"
        if body != "hello" and envelope.run != self._run:
            return envelope, "another run"
        return envelope, ""


class _Door(grpc.GenericRpcHandler):
    """Leads a call to its handler. It is asked before the message is read, so it can count all."""

    def __init__(self, handler: Callable[[bytes, Any], Any], counters: Counters) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(handler)
        self._counters = counters

    def service(self, handler_call_details: Any) -> Any:
        self._counters.calls += 1
        return self._handler if handler_call_details.method == METHOD else None


def _pinned(member: Pinned) -> bytes:
    """The member's certificate alone (PEM), so that nothing else in its file is trusted."""
    certificate = x509.load_pem_x509_certificate(member.certificate)
    if certificate.fingerprint(SHA256()).hex() != member.fingerprint.lower():
        raise UsageError(
            f"the certificate of '{member.name}' is not the one with the fingerprint "
            f"{member.fingerprint}; ask '{member.name}' which one is right."
        )
    if not isinstance(certificate.public_key(), EllipticCurvePublicKey):
        raise UsageError(
            f"the certificate of '{member.name}' has no ECDSA key, without which TLS 1.2 cannot be "
            "switched off; make one with `pevdn keys`."
        )
    return certificate.public_bytes(Encoding.PEM)


def _misfit(envelope: Envelope, body: str) -> str:
    """The first field whose length is not the one of the schema, if any."""
    if len(envelope.run) != 32:
        return "run"
    if len(envelope.view) != _VIEW.get(body, 16):
        return "view"
    message = getattr(envelope, body)
    for name, lengths in _EXACTLY.get(body, {}).items():
        value = getattr(message, name)
        values = (value,) if isinstance(value, bytes) else value
        if any(len(value) not in lengths for value in values):
            return f"{body}.{name}"
    for name, size in _ENTRIES.get(body, {}).items():
        if len(getattr(message, name)) % size:
            return f"{body}.{name}"
    beside = _BESIDE_NAMES.get(body)
    if beside and len(getattr(message, beside)) != len(message.names):
        return f"{body}.{beside}"
    return ""


def _status(receipt: Receipt) -> str:
    known = receipt.status in Status.values()
    return Status.Name(receipt.status) if known else str(receipt.status)
