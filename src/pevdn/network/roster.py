"""The members of a team, their addresses and certificates, and the settings they agree on.

`team.toml` is the same for every member and holds no secret (`roster_file.py` reads and writes it).
A member trusts only the certificates whose digests are in it, whoever signed them. Addresses, paths
and patience are not part of the agreement: a machine may move, and each member may wait as long as
it likes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509

from pevdn import worlds
from pevdn.config.experiment import Config
from pevdn.config.settings import number
from pevdn.errors import UsageError, unknown

WORLD = "world"
MODES = ("shares", "pairwise-masks")
PATIENCE = 3600.0  # seconds
RESERVED = (WORLD, "authority")
MOST_DIFFERENCES = 50


@dataclass(frozen=True)
class Member:
    """One process of the team, and the only certificate that it is trusted with."""

    name: str
    address: str  # host:port
    certificate: bytes  # PEM, this one certificate alone
    fingerprint: str  # SHA-256 of its DER form, in hex

    @property
    def expires(self) -> datetime:
        """When the certificate expires."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc


@dataclass(frozen=True)
class Roster:
    """The content of `team.toml`; party i is agent i of the world."""

    path: Path
    team: str  # random, so that no two teams have the same agreement
    config: Config
    mode: str
    patience: float  # seconds that a member waits for a missing one
    rehearsal: bool  # all random numbers derive from the seed, as in the simulation; hides nothing
    world: Member | None
    parties: tuple[Member, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """The parties in order, then the world if there is one."""
        return self.parties if self.world is None else (*self.parties, self.world)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all members."""
        return tuple(member.name for member in self.members)

    def member(self, name: str) -> Member:
        for member in self.members:
            if member.name == name:
                return member
        raise unknown("member", name, self.names, f"{self.path} names all of them.")

    def index(self, name: str) -> int:
        """Return which agent of the world a party is."""
        names = [party.name for party in self.parties]
        if name not in names:
            raise unknown("party", name, names, f"{self.path} names all of them.")
        return names.index(name)

    @property
    def agreement(self) -> dict[str, Any]:
        """Everything that must be equal for all members, as JSON values."""
        agreement: dict[str, Any] = {
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
        return {**agreement, "seed": self.config.seed} if self.rehearsal else agreement

    @cached_property
    def run(self) -> bytes:
        """32 bytes: the digest of the agreement."""
        return hashlib.sha256(canonical(self.agreement).encode()).digest()


def with_randomness(config: Config, rehearsal: bool) -> Config:
    """Return the configuration with the source of randomness: outside rehearsals, secrets."""
    settings = dataclasses.replace(config.settings, randomness="seed" if rehearsal else "os")
    return dataclasses.replace(config, settings=settings)


# ---- comparing agreements ---------------------------------------------------------------------


def canonical(agreement: Mapping[str, Any]) -> str:
    """Return the unique JSON text of an agreement."""
    return json.dumps(agreement, sort_keys=True, separators=(",", ":"), allow_nan=False)


def differences(mine: Any, theirs: Any) -> list[str]:
    """Describe where two agreements differ; `theirs` may be any JSON value."""
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
        yield f"{path or 'the agreement'} is {shown(mine)} here and {shown(theirs)} there"


MISSING = object()
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 80
_shorten.maxlist = 40


def shown(value: Any) -> str:
    """Return a value for an error message, shortened."""
    return "missing" if value is MISSING else _shorten.repr(value)


def _short_name(key: str) -> str:
    return key if re.fullmatch(r"[\w-]{1,80}", key, re.ASCII) else _shorten.repr(key)


# ---- checks -----------------------------------------------------------------------------------


def check_team(
    config: Config,
    mode: str,
    parties: Sequence[tuple[str, str]],
    world_address: str | None,
) -> None:
    """Refuse a team that could not train; parties are names and addresses."""
    if config.exchange == "central":
        raise UsageError(
            f"algorithm is '{config.algorithm}', which needs a central node, and a team of "
            "processes has none; choose pe-vdn-b, or simulate it with `pevdn train`."
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
    addresses = [*parties, *([] if world_address is None else [(WORLD, world_address)])]
    check_distinct("the name", names, names)
    check_distinct(
        "the address",
        [_parse_address(name, address) for name, address in addresses],
        [name for name, _ in addresses],
    )
    agents = worlds.team_size(config.env)
    if len(parties) != agents:
        raise UsageError(
            f"the team has {len(parties)} parties, but {config.env} has {agents} agents; name one "
            "party for each agent, or choose another env."
        )


def seconds(patience: Any) -> float:
    """Return a checked patience."""
    return float(number("patience", patience, float, 0.1, 1e7))


def _check_name(name: str) -> None:
    if name in RESERVED:
        raise UsageError(f"'{name}' cannot be the name of a party; choose another.")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name):
        raise UsageError(
            f"the party name {shown(name)} must be at most 63 of a-z, 0-9 and '-', with a letter "
            "first and no '-' last."
        )


def check_distinct(what: str, values: Sequence[Any], names: Sequence[str]) -> None:
    first: dict[Any, str] = {}
    for name, value in zip(names, values, strict=True):
        if value in first:
            who = f"two parties '{name}'" if name == first[value] else f"{first[value]} and {name}"
            raise UsageError(f"{who} have {what} in common; give every member its own.")
        first[value] = name


def _parse_address(name: str, address: str) -> tuple[str, int]:
    """Return host and port; equal for two spellings of the same address."""
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise UsageError(
            f"the address of {name} is {shown(address)}, but must be host:port, as in "
            "10.0.0.2:7700."
        )
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise UsageError(
            f"the address of {name} is {shown(address)}, but its port must be a whole number "
            "from 1 to 65535."
        )
    return _parse_host(name, address, host), int(port)


def _parse_host(name: str, address: str, host: str) -> str:
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.IPv6Address(host[1:-1]) if bracketed else ipaddress.IPv4Address(host)
    except ValueError:
        label = r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?"
        like_ip = host.rpartition(".")[2].isdigit()
        if bracketed or like_ip or not re.fullmatch(rf"{label}(\.{label})*", host.lower()):
            raise UsageError(
                f"the address of {name} is {shown(address)}, but its host must be a name, an IPv4 "
                "address or an IPv6 address in brackets."
            ) from None
        return host.lower()
    if ip.is_unspecified:
        raise UsageError(
            f"the address of {name} is {shown(address)}, but no member can connect to {ip}; write "
            "the address at which the other members reach it."
        )
    return str(ip)
