"""A team of two and a world on disk, to be spoilt."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from pevdn.config import experiment as configuration
from pevdn.config.experiment import Config
from pevdn.errors import UsageError
from pevdn.network import keys, roster_file

PARTIES = [("alice", "10.0.0.2:7700"), ("bob", "10.0.0.3:7700")]
WORLD = "10.0.0.1:7700"


def two(**changes: Any) -> Config:
    return configuration.make("pe-vdn-b", "toy:two-step", 1000, **changes)


def edit(team: Path, pattern: str, text: str, count: int = 1) -> None:
    path = team / "team.toml"
    changed, hits = re.subn(pattern, lambda _: text, path.read_text(), count=count, flags=re.M)
    assert hits, pattern
    path.write_text(changed)


def refusal(team: Path) -> str:
    """The one sentence in which a roster is refused; it names the file."""
    with pytest.raises(UsageError) as caught:
        roster_file.read(team / "team.toml")
    sentence = str(caught.value)
    assert sentence.startswith(f"{team / 'team.toml'}: ") and "\n" not in sentence
    return sentence


def pin(team: Path, name: str) -> None:
    """Make the roster trust whatever NAME.pem now is."""
    certificate = x509.load_pem_x509_certificate((team / f"{name}.pem").read_bytes())
    digest = certificate.fingerprint(hashes.SHA256()).hex()
    edit(team, rf'(?<=certificate = "{name}.pem"\nsha256 = ")[0-9a-f]+', digest)


def authority(team: Path) -> keys.Pair:
    key = serialization.load_pem_private_key((team / "authority.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return keys.Pair(x509.load_pem_x509_certificate((team / "authority.pem").read_bytes()), key)


def certificate_for(name: str, key: Any, first: int = -1, last: int = 1) -> bytes:
    """Signed by itself, valid from and until so many days from now."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now + timedelta(days=first))
        .not_valid_after(now + timedelta(days=last))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )


def p256() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())
