"""Who is in the team, where, with which certificate, and what all of them have agreed on.

`team.toml` is the same for every member and holds no secret. A member trusts the certificates
whose digests stand in it and no others, whoever signed them. Addresses, paths and patience are not
part of the agreement: a machine may move, and every party may wait as long as it likes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
import os
import re
import reprlib
import stat
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from pevdn import worlds
from pevdn.config import experiment as configuration
from pevdn.config.experiment import Config
from pevdn.config.settings import number
from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.storage import files

WORLD = "world"
MODES = ("shares", "pairwise-masks")
PATIENCE = 3600.0  # seconds
RESERVED = (WORLD, "authority")
MOST_DIFFERENCES = 50

REQUIRED = ("team", "algorithm", "env", "steps", "mode", "party")
KEYS = (*REQUIRED, "rehearsal", "seed", "patience", "settings", "world")
PLACE = ("address", "certificate", "sha256")


@dataclass(frozen=True)
class Member:
    """One process of the team, and the only certificate that it is believed with."""

    name: str
    address: str  # host:port
    certificate: bytes  # PEM, this one certificate alone
    fingerprint: str  # SHA-256 of its DER form, in hex

    @property
    def expires(self) -> datetime:
        """When the certificate stops to be valid."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc


@dataclass(frozen=True)
class Roster:
    """What `team.toml` says; party i is agent i of the world."""

    path: Path
    team: str  # random, so that no two teams make the same agreement
    config: Config
    mode: str
    patience: float  # seconds that a missing member is waited for
    rehearsal: bool  # everything is drawn from the seed, as in the simulation; hides nothing
    world: Member | None
    parties: tuple[Member, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """The parties in order, and then the world if there is one."""
        return self.parties if self.world is None else (*self.parties, self.world)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all members."""
        return tuple(member.name for member in self.members)

    def member(self, name: str) -> Member:
        for member in self.members:
            if member.name == name:
                return member
        raise unknown("member", name, self.names, f"{self.path} names all of them.")

    def index(self, name: str) -> int:
        """Which agent of the world a party is."""
        names = [party.name for party in self.parties]
        if name not in names:
            raise unknown("party", name, names, f"{self.path} names all of them.")
        return names.index(name)

    @property
    def agreement(self) -> dict[str, Any]:
        """Everything that has to be the same for all members; JSON can hold it."""
        found: dict[str, Any] = {
            "team": self.team,
            "algorithm": self.config.algorithm,
            "env": self.config.env,
            "steps": self.config.steps,
            "mode": self.mode,
            "rehearsal": self.rehearsal,
            "settings": dataclasses.asdict(self.config.settings),
            "parties": [party.name for party in self.parties],
            "certificates": {member.name: member.fingerprint for member in self.members},
        }
        return {**found, "seed": self.config.seed} if self.rehearsal else found

    @cached_property
    def run(self) -> bytes:
        """32 bytes that are equal only where the whole agreement is."""
        return hashlib.sha256(canonical(self.agreement).encode()).digest()


def with_randomness(config: Config, rehearsal: bool) -> Config:
    """The configuration with what parties draw from: in earnest each has a secret of its own."""
    drawn = "seed" if rehearsal else "os"
    settings = dataclasses.replace(config.settings, randomness=drawn)
    return dataclasses.replace(config, settings=settings)


def canonical(agreement: Mapping[str, Any]) -> str:
    """The one way to write an agreement down as JSON."""
    return json.dumps(agreement, sort_keys=True, separators=(",", ":"), allow_nan=False)


def differences(mine: Any, theirs: Any) -> list[str]:
    """In words, where two agreements part; theirs may be anything that JSON can hold."""
    found = []
    for difference in _differences("", mine, theirs):
        found.append(difference)
        if len(found) == MOST_DIFFERENCES:
            break
    return found


def _differences(path: str, mine: Any, theirs: Any) -> Iterator[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            below = f"{path}.{_short_name(key)}" if path else _short_name(key)
            yield from _differences(below, mine.get(key, MISSING), theirs.get(key, MISSING))
    elif type(mine) is not type(theirs) or mine != theirs:
        yield f"{path or 'the agreement'} is {_shown(mine)} here and {_shown(theirs)} there"


MISSING = object()
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 80
_shorten.maxlist = 40


def _shown(value: Any) -> str:
    return "missing" if value is MISSING else _shorten.repr(value)


def _short_name(key: str) -> str:
    return key if re.fullmatch(r"[\w-]{1,80}", key, re.ASCII) else _shorten.repr(key)


# ---- what a team may look like ----------------------------------------------------------------


def check_team(
    config: Config,
    mode: str,
    parties: Sequence[tuple[str, str]],
    world_address: str | None,
) -> None:
    """Refuses a team that could not train; parties are names and addresses."""
    if config.exchange == "central":
        raise UsageError(
            f"algorithm is '{config.algorithm}', but it puts everything in one place, and a team "
            "of processes has no such place; choose pe-vdn-b, or simulate it with `pevdn train`."
        )
    if config.seeds != 1:
        raise UsageError(f"seeds is {config.seeds}, but a team trains with one; set it to 1.")
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    if len(parties) < 2:
        raise UsageError(f"a team has at least two parties, but this one has {len(parties)}.")
    names = [name for name, _ in parties]
    for name in names:
        _check_name(name)
    places = [*parties, *([] if world_address is None else [(WORLD, world_address)])]
    _check_unlike("the name", names, names)
    _check_unlike(
        "the address",
        [_place(name, address) for name, address in places],
        [name for name, _ in places],
    )
    agents = worlds.team_size(config.env)
    if len(parties) != agents:
        raise UsageError(
            f"the team has {len(parties)} parties, but {config.env} has {agents} agents; name one "
            "party for each agent, or choose another env."
        )


def seconds(patience: Any) -> float:
    """A checked patience."""
    return float(number("patience", patience, float, 0.1, 1e7))


def _check_name(name: str) -> None:
    if name in RESERVED:
        raise UsageError(f"'{name}' cannot be the name of a party; choose another.")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name):
        raise UsageError(
            f"the party name {_shown(name)} has to be at most 63 of a-z, 0-9 and '-', with a "
            "letter first and no '-' last."
        )


def _check_unlike(what: str, values: Sequence[Any], names: Sequence[str]) -> None:
    first: dict[Any, str] = {}
    for name, value in zip(names, values, strict=True):
        if value in first:
            who = f"two parties '{name}'" if name == first[value] else f"{first[value]} and {name}"
            raise UsageError(f"{who} have {what} in common; give every member its own.")
        first[value] = name


def _place(name: str, address: str) -> tuple[str, int]:
    """Host and port; the same for two ways to write the same."""
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise UsageError(
            f"the address of {name} is {_shown(address)}, but must be host:port, as in "
            "10.0.0.2:7700."
        )
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise UsageError(
            f"the address of {name} is {_shown(address)}, but its port must be a whole number "
            "from 1 to 65535."
        )
    return _host(name, address, host), int(port)


def _host(name: str, address: str, host: str) -> str:
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.IPv6Address(host[1:-1]) if bracketed else ipaddress.IPv4Address(host)
    except ValueError:
        label = r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?"
        like_ip = host.rpartition(".")[2].isdigit()
        if bracketed or like_ip or not re.fullmatch(rf"{label}(\.{label})*", host.lower()):
            raise UsageError(
                f"the address of {name} is {_shown(address)}, but its host must be a name, an IPv4 "
                "address or an IPv6 address in brackets."
            ) from None
        return host.lower()
    if ip.is_unspecified:
        raise UsageError(
            f"the address of {name} is {_shown(address)}, but nobody can call {ip}; write the "
            "address that the other members reach it at."
        )
    return str(ip)


# ---- reading ----------------------------------------------------------------------------------


def read(path: Path) -> Roster:
    """The team that `path` describes, with every certificate the one that it names."""
    try:
        return _parsed(path, _document(path))
    except UsageError as problem:
        raise UsageError(f"{path}: {problem}") from None


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"cannot be read ({problem.strerror}); `pevdn keys` makes one.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        reason = " ".join(str(problem).split())
        raise UsageError(f"this is not TOML ({reason}); `pevdn keys` makes one that is.") from None


def _parsed(path: Path, found: dict[str, Any]) -> Roster:
    _check_keys("key", found, KEYS, REQUIRED)
    team, algorithm, env, mode = (
        _typed(name, found[name], str) for name in ("team", "algorithm", "env", "mode")
    )
    if not re.fullmatch("[0-9a-f]{32}", team):
        raise UsageError(
            f"team is {_shown(team)}, but must be 32 hex digits that no other team has; "
            "`pevdn keys` draws them."
        )
    rehearsal = _typed("rehearsal", found.get("rehearsal", False), bool)
    patience = seconds(found.get("patience", PATIENCE))
    settings = _typed("settings", found.get("settings", {}), dict)
    config = configuration.make(
        algorithm, env, found["steps"], seed=found.get("seed", 0), settings=settings
    )
    config = with_randomness(config, rehearsal)
    parties = [
        _entry("[[party]]", e, ("name", *PLACE)) for e in _typed("party", found["party"], list)
    ]
    world = _entry("[world]", found[WORLD], PLACE) if WORLD in found else None
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
    _check_unlike("the key of their certificates", keys, roster.names)
    return roster


def _entry(table: str, found: Any, keys: Collection[str]) -> dict[str, str]:
    """What the file says of one member: all of the keys, and all of them text."""
    entry = _typed(table, found, dict)
    _check_keys(f"key of {table}", entry, keys, keys)
    return {name: _typed(f"{name} in {table}", value, str) for name, value in entry.items()}


def _check_keys(
    kind: str, found: Mapping[str, Any], known: Collection[str], required: Collection[str]
) -> None:
    for name in found:
        if name not in known:
            raise unknown(kind, name, known)
    for name in required:
        if name not in found:
            raise UsageError(f"the {kind} '{name}' is missing; add it.")


KINDS = {str: "text", bool: "true or false", dict: "a table", list: "tables: [[party]]"}


def _typed(name: str, value: Any, wanted: type) -> Any:
    if not isinstance(value, wanted):
        raise UsageError(f"{name} is {_shown(value)}, but must be {KINDS[wanted]}.")
    return value


def _member(folder: Path, name: str, entry: Mapping[str, str]) -> Member:
    path = folder / entry["certificate"]
    pinned = entry["sha256"].replace(":", "").lower()  # openssl writes AB:CD:…
    certificate = _certificate(name, path)
    fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
    if fingerprint != pinned:
        raise UsageError(
            f"the certificate of {name}, {path}, has the sha256 {fingerprint}, but the roster says "
            f"{_shown(pinned)}; use the file that belongs to this roster."
        )
    _check_certificate(name, path, certificate)
    pem = certificate.public_bytes(Encoding.PEM)
    return Member(name, entry["address"], pem, fingerprint)


def _certificate(name: str, path: Path) -> x509.Certificate:
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as problem:
        raise UsageError(
            f"the certificate of {name}, {path}, cannot be read ({problem.strerror}); put it there."
        ) from None
    except ValueError:
        found = []
    if len(found) != 1:
        raise UsageError(
            f"the certificate of {name}, {path}, is not one certificate in PEM form; use the file "
            "that `pevdn keys` wrote."
        )
    return found[0]


def _check_certificate(name: str, path: Path, certificate: x509.Certificate) -> None:
    whose = f"the certificate of {name}, {path},"
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise UsageError(
            f"{whose} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; make a new team with "
            "`pevdn keys`."
        )
    if now < certificate.not_valid_before_utc:
        raise UsageError(
            f"{whose} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on; "
            "set the clock of this machine right."
        )
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise UsageError(
            f"{whose} has a key of another kind than ECDSA P-256, which the connections between "
            "members rest on; use one that `pevdn keys` made."
        )
    if name not in _dns_names(certificate):
        raise UsageError(f"{whose} is not made out to '{name}'; use the one that is.")


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
    """The private key of a member, as PEM; only its owner may be able to read the file."""
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
            f"the private key {path} is open to others (mode {mode:03o}); close it with "
            f"`chmod 600 {path}`, or make a new team if somebody may have read it."
        )
    try:
        key = serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(
            f"{path} is not a private key in PEM form without a password; use the file that "
            "`pevdn keys` wrote."
        ) from None
    if _spki(key.public_key()) != _public(member.certificate):
        raise UsageError(
            f"the private key {path} does not belong to the certificate of {member.name}; use the "
            "key that was made with it."
        )
    return key.private_bytes(
        Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


# ---- writing ----------------------------------------------------------------------------------


def write(roster: Roster) -> None:
    """`team.toml`, new; it says that the certificate of NAME is NAME.pem beside it."""
    new_file(roster.path, to_text(roster).encode())


def to_text(roster: Roster) -> str:
    """The content of team.toml."""
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
        "# The same for every member, and no secret. Only addresses, paths and patience may change."
    )
    return "\n".join([_table(head, top), settings, *world, *parties])


def _written(member: Member) -> dict[str, str]:
    certificate, sha256 = f"{member.name}.pem", member.fingerprint
    return {"address": member.address, "certificate": certificate, "sha256": sha256}


def _table(head: str, values: Mapping[str, Any]) -> str:
    """JSON writes checked words, numbers, true and false just as TOML does."""
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
    return UsageError(f"{path} is there already and is never overwritten; choose another --out.")
