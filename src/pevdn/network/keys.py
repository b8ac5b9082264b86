"""Create the certificates and private keys of a team in one place, to be handed out.

Whoever creates them holds every private key until it is handed out and deleted, and can act as any
member until then. The authority only signs: members trust the certificates in the roster, so a
certificate that the authority's key signs later is refused.

All keys are ECDSA P-256: TLS 1.2 is switched off by offering it RSA suites only.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pevdn.config.experiment import Config
from pevdn.config.settings import number
from pevdn.errors import PevdnError, UsageError
from pevdn.network import roster, roster_file
from pevdn.network.roster import PATIENCE, WORLD, Member, Roster
from pevdn.storage.files import make_private

DAYS = 365  # a member's certificate is valid for
AUTHORITY_DAYS = 3650
EARLY = timedelta(hours=1)  # certificates are valid from before: members' clocks may be slow


class Pair(NamedTuple):
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def make_authority() -> Pair:
    """Create the authority that signs the certificates of one team."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named("pevdn authority")
    now = datetime.now(UTC)
    certificate = (
        _builder(name, name, key.public_key(), now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Pair(certificate, key)


def issue(name: str, authority: Pair, days: int = DAYS) -> Pair:
    """Issue a certificate to `name`, for both ends of a connection."""
    days = number("days", days, int, 1, AUTHORITY_DAYS)
    key = ec.generate_private_key(ec.SECP256R1())
    signer = authority.certificate
    now = datetime.now(UTC)
    until = min(now + timedelta(days=days), signer.not_valid_after_utc)
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        _builder(_named(name), signer.subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(above, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Pair(certificate, key)


def create(
    out: Path,
    config: Config,
    parties: Sequence[tuple[str, str]],
    world_address: str | None = None,
    mode: str = "shares",
    patience: float = PATIENCE,
    rehearsal: bool = False,
    days: int = DAYS,
) -> Roster:
    """Create a team in `out`: team.toml, and NAME.pem and NAME.key of authority and members.

    Parties are names and addresses, in the order of the world's agents. No file is overwritten;
    after a failure no file is left behind.
    """
    roster.check_team(config, mode, parties, world_address)
    config = roster.with_randomness(config, rehearsal)
    patience = roster.seconds(patience)
    days = number("days", days, int, 1, AUTHORITY_DAYS)
    addresses = dict(parties) | ({} if world_address is None else {WORLD: world_address})
    path = out / "team.toml"
    _check_free(path, *(out / f"{n}.{end}" for n in ("authority", *addresses) for end in ENDS))
    authority = make_authority()
    pairs = {name: issue(name, authority, days) for name in addresses}
    members = [_member(name, addresses[name], pair) for name, pair in pairs.items()]
    world = None if world_address is None else members.pop()
    team = secrets.token_hex(16)
    made = Roster(path, team, config, mode, patience, rehearsal, world, tuple(members))
    _write(made, {"authority": authority, **pairs})
    return made


ENDS = ("pem", "key")


def _write(made: Roster, pairs: dict[str, Pair]) -> None:
    out, written = made.path.parent, []
    try:
        make_private(out)
    except OSError as problem:
        raise PevdnError(f"cannot create {out}: {problem.strerror or problem}.") from None
    try:
        for name, pair in pairs.items():
            for end, content, mode in (
                ("key", pair.key_pem, 0o600),
                ("pem", pair.certificate_pem, 0o644),
            ):
                path = out / f"{name}.{end}"
                roster_file.new_file(path, content, mode)
                written.append(path)
        roster_file.write(made)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise


def _member(name: str, address: str, pair: Pair) -> Member:
    fingerprint = pair.certificate.fingerprint(hashes.SHA256()).hex()
    return Member(name, address, pair.certificate_pem, fingerprint)


def _check_free(*paths: Path) -> None:
    out = paths[0].parent
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; choose another directory with --out.")
    for path in paths:
        if os.path.lexists(path):
            raise roster_file.taken(path)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
