"""Authenticated delivery of messages between members: one gRPC call over mutual TLS 1.3.

Certificates are pinned at both ends, whoever signed them. The server trusts the certificates of the
roster and no authority, and compares the presented certificate with that of the sender named in the
message. The client trusts only the certificate of the member that it calls. So messages go to and
come from members alone. An `Envelope` that does not match the schema, or is of another run, is
refused before the rest of the program sees it.

A message may arrive twice, if its receipt was lost, and out of order. `receive` must recognise
duplicates.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import DecodeError

from pevdn.errors import PevdnError, UsageError, unknown

# Switch TLS 1.2 off: allow only a suite that needs an RSA key, while members have ECDSA keys. gRPC
# has no other option for it, and reads this variable once.
_SUITES = "ECDHE-RSA-AES256-GCM-SHA384"
if "grpc" in sys.modules and os.environ.get("GRPC_SSL_CIPHER_SUITES") != _SUITES:
    raise PevdnError(
        "grpc was imported before pevdn.network.transport, too late to switch TLS 1.2 off; import "
        f"it afterwards, or set GRPC_SSL_CIPHER_SUITES={_SUITES}."
    )
os.environ["GRPC_SSL_CIPHER_SUITES"] = _SUITES

import grpc  # noqa: E402
import grpc.aio  # noqa: E402

from pevdn.network.channel_options import CLIENT, SERVER  # noqa: E402
from pevdn.network.roster import Member, Roster  # noqa: E402
from pevdn.network.schema import misfit  # noqa: E402
from pevdn.network.traffic import Counters  # noqa: E402
from pevdn.network.wire_pb2 import LATER, NOTHING, REFUSED, Envelope, Receipt, Status  # noqa: E402

METHOD = "/pevdn.Member/Deliver"
LIMIT = 64 * 2**20  # bytes of a message

ATTEMPT = 60.0  # seconds after which a call without an answer is made again
FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 0.02, 0.5, 1.5  # seconds between two attempts

# Errors that another attempt will not change.
_FINAL = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}

_log = logging.getLogger(__name__)


class Unreachable(PevdnError):
    """A member accepted no message until the deadline."""

    def __init__(self, name: str, seconds: float, why: str = "") -> None:
        super().__init__(
            f"'{name}' accepted no message for {seconds:.1f} s{': ' + why if why else ''}; check "
            "that it runs, with the address and certificate of the roster."
        )
        self.name = name
        self.seconds = seconds


class Transport:
    """One member's end of all connections.

    `receive` gets every envelope that is authentic, of this run (a Hello: of any run) and matches
    the schema; its receipt is returned to the sender. It must not block. `tap` sees every byte
    string that leaves, envelopes at every attempt and receipts, with the receiver's name.
    """

    def __init__(
        self,
        roster: Roster,
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
        """Listen; the other members need not run yet."""
        server = grpc.aio.server(
            options=(*SERVER, ("grpc.max_receive_message_length", self._limit))
        )
        server.add_generic_rpc_handlers((_Handlers(self._deliver, self.counters),))
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
                f"'{self.me}' cannot listen at {self._listen}; check that the address belongs to "
                "this machine and that no other process listens there."
            )
        await server.start()
        self._server = server
        for name, peer in self._peers.items():
            channel = grpc.aio.secure_channel(
                peer.address,
                grpc.ssl_channel_credentials(self._certificates[name], self._key, self._own),
                options=(*CLIENT, ("grpc.ssl_target_name_override", name)),
            )
            self._channels[name] = channel
            self._calls[name] = channel.unary_unary(METHOD)

    async def stop(self, grace: float = 0.5) -> None:
        """Close all connections; calls under way have `grace` seconds to be answered."""
        server, self._server = self._server, None
        channels, self._channels = self._channels, {}
        self._calls = {}
        for channel in channels.values():
            await channel.close()
        if server is not None:
            await server.stop(grace)

    async def send(self, to: str, envelope: Envelope, *, until: float | None) -> Receipt:
        """Deliver an envelope; return the receipt: ACCEPTED, DUPLICATE or REFUSED.

        Retry while the member cannot be reached or answers LATER, until time.monotonic() passes
        `until` (None: forever), then raise Unreachable.
        """
        if to not in self._peers:
            raise unknown("member", to, self._peers)
        data = envelope.SerializeToString()
        traffic = self.counters.peers[to]
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
                traffic.failed += 1
                why = f"{error.code().name}: {error.details()}"
                if error.code() in _FINAL:
                    return Receipt(status=REFUSED, reason=why)
            else:
                traffic.messages_sent += 1
                traffic.bytes_sent += len(data)
                traffic.seconds += time.monotonic() - now
                if receipt.status != LATER:
                    return receipt
                why = f"LATER: {receipt.reason}"
            left = pause if until is None else min(pause, until - time.monotonic())
            await asyncio.sleep(max(left, 0.0))
            pause = min(pause * GROWTH, LONGEST_PAUSE)

    async def _attempt(self, to: str, data: bytes, timeout: float) -> Receipt:
        call = self._calls.get(to)
        if call is None:
            raise PevdnError(f"'{self.me}' is not connected; call start() before send().")
        if self.tap is not None:
            self.tap(to, data)
        try:
            answer = await call(data, timeout=timeout)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if to in self._calls or (task is not None and task.cancelling()):
                raise
            raise PevdnError(f"'{self.me}' disconnected while it sent to '{to}'.") from None
        try:
            receipt = Receipt.FromString(answer)
        except DecodeError:
            receipt = Receipt()
        if receipt.status == NOTHING or receipt.status not in Status.values():
            return Receipt(status=REFUSED, reason=f"'{to}' sent an invalid receipt")
        return receipt

    async def _deliver(self, data: bytes, context: Any) -> bytes:
        """Serve one call; every message gets a receipt."""
        sender = self._authenticate(context.auth_context())
        traffic = self.counters.peers[sender]
        traffic.messages_received += 1
        traffic.bytes_received += len(data)
        envelope, why = self._parse(sender, data)
        if why:
            receipt = Receipt(status=REFUSED, reason=why)
        else:
            try:
                receipt = self._receive(envelope)
            except Exception:
                _log.exception("failed to handle a message of '%s'", sender)
                receipt = Receipt(status=REFUSED, reason="the receiver failed")
        self.counters.answer(receipt)
        answer = receipt.SerializeToString()
        if self.tap is not None:
            self.tap(sender, answer)
        return answer

    def _authenticate(self, auth: dict[str, Sequence[bytes]]) -> str:
        """Return the member with this certificate, or an empty string."""
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

    def _parse(self, sender: str, data: bytes) -> tuple[Envelope, str]:
        """Parse an envelope; return it, and why it is refused, if it is."""
        envelope = Envelope()
        if not sender:
            return envelope, "the certificate is not in the roster"
        try:
            envelope.ParseFromString(data)
        except DecodeError:
            return envelope, "not an envelope"
        if envelope.sender != sender:
            return envelope, "the sender does not match the certificate"
        # Unknown fields or repeated ones make the parsed message shorter than the data.
        envelope.DiscardUnknownFields()
        if envelope.ByteSize() != len(data):
            return envelope, "unknown or repeated fields"
        body = envelope.WhichOneof("body")
        if body is None:
            return envelope, "no body"
        if field := misfit(envelope, body):
            return envelope, f"wrong length of {field}"
        if body != "hello" and envelope.run != self._run:
            return envelope, "another run"
        return envelope, ""


class _Handlers(grpc.GenericRpcHandler):
    """Finds the handler of a call. gRPC asks it before it reads the message, so it counts all."""

    def __init__(self, handler: Callable[[bytes, Any], Any], counters: Counters) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(handler)
        self._counters = counters

    def service(self, handler_call_details: Any) -> Any:
        self._counters.calls += 1
        return self._handler if handler_call_details.method == METHOD else None


def _pinned(member: Member) -> bytes:
    """Return only the member's certificate (PEM), so that nothing else in its file is trusted."""
    certificate = x509.load_pem_x509_certificate(member.certificate)
    if certificate.fingerprint(SHA256()).hex() != member.fingerprint.lower():
        raise UsageError(
            f"the certificate of '{member.name}' does not have the fingerprint "
            f"{member.fingerprint}; ask '{member.name}' which one is right."
        )
    if not isinstance(certificate.public_key(), EllipticCurvePublicKey):
        raise UsageError(
            f"the certificate of '{member.name}' has no ECDSA key, so TLS 1.2 cannot be switched "
            "off; make one with `pevdn keys`."
        )
    return certificate.public_bytes(Encoding.PEM)
