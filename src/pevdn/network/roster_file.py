"""Read and write `team.toml`, and read the certificates and private keys beside it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from pevdn.config import experiment as configuration
from pevdn.config.settings import OLD_NAMES
from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.network.roster import (
    PATIENCE,
    WORLD,
    Member,
    Roster,
    check_distinct,
    check_team,
    seconds,
    shown,
    with_randomness,
)
from pevdn.storage import files

REQUIRED = ("team", "algorithm", "env", "steps", "mode", "party")
KEYS = (*REQUIRED, "rehearsal", "seed", "patience", "settings", "world")
PLACE = ("address", "certificate", "sha256")
KINDS = {str: "text", bool: "true or false", dict: "a table", list: "tables: [[party]]"}


def read(path: Path) -> Roster:
    """Read a team, and check that every certificate is the one it names."""
    try:
        return _parse(path, _load(path))
    except UsageError as problem:
        raise UsageError(f"{path}: {problem}") from None


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"cannot be read ({problem.strerror}); `pevdn keys` makes one.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        reason = " ".join(str(problem).split())
        raise UsageError(f"this is not TOML ({reason}); `pevdn keys` makes one that is.") from None


def _parse(path: Path, values: dict[str, Any]) -> Roster:
    _check_keys("key", values, KEYS, REQUIRED)
    team, algorithm, env, mode = (
        _typed(name, values[name], str) for name in ("team", "algorithm", "env", "mode")
    )
    if not re.fullmatch("[0-9a-f]{32}", team):
        raise UsageError(
            f"team is {shown(team)}, but must be 32 hex digits that no other team has; "
            "`pevdn keys` generates them."
        )
    rehearsal = _typed("rehearsal", values.get("rehearsal", False), bool)
    patience = seconds(values.get("patience", PATIENCE))
    settings = _typed("settings", values.get("settings", {}), dict)
    if old := [name for name in settings if name in OLD_NAMES]:
        raise UsageError(
            f"{path} was made by an earlier version of pevdn (it sets {old[0]}); finish that team "
            "with that version, or make a new one with `pevdn keys`."
        )
    config = configuration.make(
        algorithm, env, values["steps"], seed=values.get("seed", 0), settings=settings
    )
    config = with_randomness(config, rehearsal)
    parties = [
        _entry("[[party]]", e, ("name", *PLACE)) for e in _typed("party", values["party"], list)
    ]
    world = _entry("[world]", values[WORLD], PLACE) if WORLD in values else None
    check_team(
        config,
        mode,
        [(party["name"], party["address"]) for party in parties],
        None if world is None else world["address"],
    )
    members = [_member(path.parent, party["name"], party) for party in parties]
    host = None if world is None else _member(path.parent, WORLD, world)
    roster = Roster(path, team, config, mode, patience, rehearsal, host, tuple(members))
    keys = [_public(member.certificate) for member in roster.members]
    check_distinct("the key of their certificates", keys, roster.names)
    return roster


def _entry(table: str, values: Any, keys: Collection[str]) -> dict[str, str]:
    """Return the text values of one member's table, all of them present."""
    entry = _typed(table, values, dict)
    _check_keys(f"key of {table}", entry, keys, keys)
    return {name: _typed(f"{name} in {table}", value, str) for name, value in entry.items()}


def _check_keys(
    kind: str, values: Mapping[str, Any], known: Collection[str], required: Collection[str]
) -> None:
    for name in values:
        if name not in known:
            raise unknown(kind, name, known)
    for name in required:
        if name not in values:
            raise UsageError(f"the {kind} '{name}' is missing; add it.")


def _typed(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {shown(value)}, but must be {KINDS[kind]}.")
    return value


def _member(folder: Path, name: str, entry: Mapping[str, str]) -> Member:
    path = folder / entry["certificate"]
    pinned = entry["sha256"].replace(":", "").lower()  # openssl writes AB:CD:…
    certificate = _certificate(name, path)
    fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
    if fingerprint != pinned:
        raise UsageError(
            f"the certificate of {name}, {path}, has the sha256 {fingerprint}, but the roster says "
            f"{shown(pinned)}; use the file that belongs to this roster."
        )
    _check_certificate(name, path, certificate)
    pem = certificate.public_bytes(Encoding.PEM)
    return Member(name, entry["address"], pem, fingerprint)


def _certificate(name: str, path: Path) -> x509.Certificate:
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as problem:
        raise UsageError(
            f"the certificate of {name}, {path}, cannot be read ({problem.strerror}); put it there."
        ) from None
    except ValueError:
        certificates = []
    if len(certificates) != 1:
        raise UsageError(
            f"the certificate of {name}, {path}, must be exactly one certificate in PEM form; use "
            "the file that `pevdn keys` wrote."
        )
    return certificates[0]


def _check_certificate(name: str, path: Path, certificate: x509.Certificate) -> None:
    subject = f"the certificate of {name}, {path},"
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise UsageError(
            f"{subject} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; make a new team "
            "with `pevdn keys`."
        )
    if now < certificate.not_valid_before_utc:
        raise UsageError(
            f"{subject} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; "
            "set the clock of this machine."
        )
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise UsageError(
            f"{subject} has no ECDSA P-256 key, which members need to connect; use one that "
            "`pevdn keys` made."
        )
    if name not in _dns_names(certificate):
        raise UsageError(f"{subject} is not issued to '{name}'; use the one that is.")


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return []
    return names.get_values_for_type(x509.DNSName)


def _public(certificate: bytes) -> bytes:
    return _spki(x509.load_pem_x509_certificate(certificate).public_key())


def _spki(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return encoded


def private_key(path: Path, member: Member) -> bytes:
    """Return the private key of a member as PEM; refuse a file that other users can read."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read()
    except OSError as problem:
        raise UsageError(
            f"the private key {path} cannot be read ({problem.strerror}); {member.name} needs the "
            "one that `pevdn keys` made."
        ) from None
    if mode & 0o077:
        raise UsageError(
            f"the private key {path} can be read by other users (mode {mode:03o}); run "
            f"`chmod 600 {path}`, or make a new team if it may have leaked."
        )
    try:
        key = serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(
            f"{path} is not an unencrypted private key in PEM form; use the file that `pevdn keys` "
            "wrote."
        ) from None
    if _spki(key.public_key()) != _public(member.certificate):
        raise UsageError(
            f"the private key {path} does not belong to the certificate of {member.name}; use the "
            "key that was created with it."
        )
    return key.private_bytes(
        Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write(roster: Roster) -> None:
    """Write a new `team.toml`; it names NAME.pem beside it as the certificate of NAME."""
    new_file(roster.path, to_text(roster).encode())


def to_text(roster: Roster) -> str:
    """Return the content of team.toml."""
    config = roster.config
    top = {
        "team": roster.team,
        "algorithm": config.algorithm,
        "env": config.env,
        "steps": config.steps,
        "mode": roster.mode,
        "rehearsal": roster.rehearsal,
        "seed": config.seed,
        "patience": roster.patience,
    }
    world = [] if roster.world is None else [_table("[world]", _written(roster.world))]
    parties = [_table("[[party]]", {"name": p.name, **_written(p)}) for p in roster.parties]
    settings = _table("[settings]", dataclasses.asdict(config.settings))
    head = (
        "# Equal for every member, and not secret. Only addresses, paths and patience may change."
    )
    return "\n".join([_table(head, top), settings, *world, *parties])


def _written(member: Member) -> dict[str, str]:
    certificate, sha256 = f"{member.name}.pem", member.fingerprint
    return {"address": member.address, "certificate": certificate, "sha256": sha256}


def _table(head: str, values: Mapping[str, Any]) -> str:
    """Return a table; JSON writes checked text, numbers and booleans as TOML does."""
    lines = [f"{name} = {json.dumps(value, allow_nan=False)}" for name, value in values.items()]
    return "\n".join([head, *lines, ""])


def new_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file that must not exist yet."""
    try:
        files.create(path, content, mode)
    except FileExistsError:
        raise taken(path) from None
    except OSError as problem:
        raise PevdnError(f"cannot write {path}: {problem.strerror or problem}.") from None


def taken(path: Path) -> UsageError:
    return UsageError(f"{path} exists already and is never overwritten; choose another --out.")
