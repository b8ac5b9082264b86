"""Reading team.toml, certificates and private keys: what is refused, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st
from network_keys import PARTIES, authority, certificate_for, edit, p256, pin, refusal, two

from pevdn.errors import UsageError
from pevdn.network import keys, roster_file


def test_a_member_gets_its_private_key(team: Path) -> None:
    found = roster_file.read(team / "team.toml")
    for name in found.names:
        path = team / f"{name}.key"
        assert roster_file.private_key(path, found.member(name)) == path.read_bytes()
    (team / "bob.key").chmod(0o400)
    assert roster_file.private_key(team / "bob.key", found.member("bob"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o610])
def test_a_private_key_that_others_can_open_is_refused(team: Path, mode: int) -> None:
    (team / "alice.key").chmod(mode)
    with pytest.raises(UsageError, match=rf"mode {mode:o}.*chmod 600 .*alice.key"):
        roster_file.private_key(
            team / "alice.key", roster_file.read(team / "team.toml").member("alice")
        )


def spoil(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


def _locked() -> bytes:
    lock = serialization.BestAvailableEncryption(b"password")
    return p256().private_bytes(Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


@pytest.mark.parametrize(
    ("spoiler", "words"),
    [
        (lambda path: path.unlink(), r"cannot be read \(No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
        (lambda path: spoil(path, b""), "not an unencrypted private key"),
        (lambda path: spoil(path, b"\x00\xff" * 99), "not an unencrypted private key"),
        (
            lambda path: spoil(path, path.with_suffix(".pem").read_bytes()),
            "not an unencrypted private key",
        ),
        (lambda path: spoil(path, _locked()), "not an unencrypted private key"),
        (lambda path: spoil(path, (path.parent / "bob.key").read_bytes()), "does not belong to"),
        (lambda path: spoil(path, path.read_bytes()[:-60]), "not an unencrypted private key"),
    ],
    ids=["missing", "folder", "empty", "noise", "certificate", "locked", "bob's", "cut"],
)
def test_a_wrong_private_key_is_one_sentence_without_the_key(
    team: Path, spoiler: Callable[[Path], Any], words: str
) -> None:
    member = roster_file.read(team / "team.toml").member("alice")
    spoiler(team / "alice.key")
    with pytest.raises(UsageError, match=words) as caught:
        roster_file.private_key(team / "alice.key", member)
    assert "alice" in str(caught.value) and "BEGIN" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


# --- bad rosters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "text", "words"),
    [
        (r"^team =.*", "team = ", "this is not TOML"),
        (r"^team =.*", 'team = "a"\nteam = "b"', "this is not TOML"),
        (r"^team =.*", 'team = "mine"', "team is 'mine', but must be 32 hex digits"),
        (r"^team =.*\n", "", "the key 'team' is missing"),
        (r"^steps =.*\n", "", "the key 'steps' is missing"),
        (r"^mode =.*\n", "", "the key 'mode' is missing"),
        (r"^algorithm", "algoritm", "unknown key 'algoritm'; did you mean 'algorithm'"),
        (r"^patience", "patiense", "did you mean 'patience'"),
        (r"^gamma", "gama", "unknown setting 'gama'; did you mean 'gamma'"),
        (r"^gamma = .*", "gamma = 2", "gamma is 2.0, but must be at most 1"),
        (r"^gamma = .*", "gamma = 1979-05-27", "gamma is '1979-05-27', but must be a number"),
        (r"^gamma = .*", "gamma = nan", "gamma is 'nan'"),
        (r"^algorithm = .*", 'algorithm = "pe-vdn"', "unknown algorithm 'pe-vdn'; did you mean"),
        (r"^algorithm = .*", 'algorithm = "vdn"', "needs a central node"),
        (r"^algorithm = .*", "algorithm = 3", "algorithm is 3, but must be text"),
        (r"^env = .*", 'env = "toy:two-stop"', "did you mean 'toy:two-step'"),
        (r"^env = .*", 'env = "smax-sc2:3m"', "has 2 parties, but smax-sc2:3m has 3 agents"),
        (r"^steps = .*", "steps = 0", "steps is 0, but must be at least 1"),
        (r"^steps = .*", "steps = true", "steps is 'True', but must be a whole number"),
        (r"^seed = .*", "seed = -1", "seed is -1"),
        (r"^mode = .*", 'mode = "share"', "unknown mode 'share'; did you mean 'shares'"),
        (r"^rehearsal = .*", 'rehearsal = "no"', "rehearsal is 'no', but must be true or false"),
        (r"^patience = .*", "patience = 0", "patience is 0.0, but must be at least 0.1"),
        (r"^patience = .*", "patience = inf", "patience is 'inf'"),
        (r"^name = .*\n", "", r"the key of \[\[party\]\] 'name' is missing"),
        (r"^name = .*", "name = 1", r"name in \[\[party\]\] is 1, but must be text"),
        (r"^name = .*", 'name = "bob"', "two parties 'bob' have the name in common"),
        (r"^name = .*", 'name = "world"', "'world' cannot be the name of a party"),
        (r"^name = .*", 'name = "authority"', "'authority' cannot be the name"),
        (r"^name = .*", 'name = "Alice"', "the party name 'Alice' must be"),
        (r"^name = .*", 'name = ""', "the party name '' must be"),
        (r"^name = .*", 'name = "../alice"', "the party name '../alice' must be"),
        (r"^name = .*", 'name = "alice\\n"', r"the party name 'alice\\n' must be"),
        (r"^name = .*", f'name = "{"a" * 64}"', "at most 63"),
        (r"10\.0\.0\.2:7700", "10.0.0.3:7700", "alice and bob have the address in common"),
        (r"10\.0\.0\.2:7700", "10.0.0.1:7700", "alice and world have the address in common"),
        (r"10\.0\.0\.2:7700", "10.0.0.3:07700", "have the address in common"),
        (r"10\.0\.0\.2:7700", "10.0.0.2", "must be host:port"),
        (r"10\.0\.0\.2:7700", ":7700", "must be host:port"),
        (r"10\.0\.0\.2:7700", "10.0.0.2:0", "port must be a whole number from 1 to 65535"),
        (r"10\.0\.0\.2:7700", "10.0.0.2:65536", "from 1 to 65535"),
        (r"10\.0\.0\.2:7700", "10.0.0.2:http", "from 1 to 65535"),
        (r"10\.0\.0\.2:7700", "10.0.0.2:-1", "from 1 to 65535"),
        (r"10\.0\.0\.2:7700", "10.0.0.2:7_7", "from 1 to 65535"),
        (r"10\.0\.0\.2:7700", "10.0.0.300:7700", "its host must be"),
        (r"10\.0\.0\.2:7700", "::1:7700", "its host must be"),
        (r"10\.0\.0\.2:7700", "[::1:7700", "its host must be"),
        (r"10\.0\.0\.2:7700", "https://a:7700", "its host must be"),
        (r"10\.0\.0\.2:7700", "unix:/tmp/a:7700", "its host must be"),
        (r"10\.0\.0\.2:7700", "0.0.0.0:7700", "no member can connect to 0.0.0.0"),
        (r"10\.0\.0\.2:7700", "[::]:7700", "no member can connect to ::"),
        (r"^address", "adress", r"unknown key of \[world\] 'adress'; did you mean 'address'"),
        (r"^seed = .*", "seed = 0\nworld = 1", "this is not TOML"),
        (r"^sha256 = .*\n", "", r"the key of \[world\] 'sha256' is missing"),
        (r'^certificate = "alice.*', 'certificate = "al.pem"', "alice, .*al.pem, cannot be read"),
        (r'^certificate = "alice.*', 'certificate = "bob.pem"', "certificate of alice.*the sha256"),
        (
            r'^certificate = "alice.*',
            'certificate = "alice.key"',
            "must be exactly one certificate",
        ),
    ],
)
def test_a_bad_roster_is_refused_in_one_sentence(
    team: Path, pattern: str, text: str, words: str
) -> None:
    edit(team, pattern, text)
    assert re.search(words, refusal(team)), refusal(team)


def test_a_misspelt_key_of_a_party_is_recognised(team: Path) -> None:
    edit(team, '^name = "alice"', 'nam = "alice"')
    assert "unknown key of [[party]] 'nam'; did you mean 'name'?" in refusal(team)


@pytest.mark.parametrize(("kept", "words"), [(1, "this one has 1"), (0, "key 'party' is missing")])
def test_one_party_is_no_team(team: Path, kept: int, words: str) -> None:
    path = team / "team.toml"
    path.write_text("[[party]]".join(path.read_text().split("[[party]]")[: 1 + kept]))
    assert words in refusal(team)


def test_one_table_is_not_a_list_of_parties(team: Path) -> None:
    path = team / "team.toml"
    path.write_text("[party]".join(path.read_text().split("[[party]]")[:2]))
    assert "must be tables: [[party]]" in refusal(team)


def test_three_parties_are_too_many_for_a_world_of_two(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 3 parties, but toy:two-step has 2 agents"):
        keys.create(tmp_path, two(), [*PARTIES, ("carol", "c:1")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["[2001:db8::1]:7700", "alice.example:1", "localhost:65535"])
def test_names_and_ipv6_are_addresses(team: Path, address: str) -> None:
    edit(team, r"10\.0\.0\.2:7700", address)
    assert roster_file.read(team / "team.toml").member("alice").address == address


def test_a_file_that_is_missing_or_no_text_is_refused(team: Path, tmp_path: Path) -> None:
    (team / "team.toml").write_bytes(b"\xff\xfe\x00")
    assert "not TOML" in refusal(team)
    assert "`pevdn keys` makes one" in refusal(tmp_path)


@given(st.binary(max_size=60), st.integers(0, 2000))
def test_a_damaged_roster_is_read_or_refused_but_never_crashes(
    pristine: Path, noise: bytes, at: int
) -> None:
    path = pristine / "damaged.toml"
    whole = (pristine / "team.toml").read_bytes()
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    try:
        roster_file.read(path)
    except UsageError as problem:
        assert "\n" not in str(problem)
    finally:
        path.unlink()


# --- certificates ----------------------------------------------------------------------------


def test_swapped_certificates_are_noticed(team: Path) -> None:
    alice, bob = team / "alice.pem", team / "bob.pem"
    first, second = alice.read_bytes(), bob.read_bytes()
    alice.write_bytes(second)
    bob.write_bytes(first)
    assert "the certificate of alice" in refusal(team) and "the roster says" in refusal(team)
    pin(team, "alice")
    pin(team, "bob")
    assert "is not issued to 'alice'" in refusal(team)


def test_another_certificate_of_the_same_authority_is_not_the_pinned_one(team: Path) -> None:
    (team / "bob.pem").write_bytes(keys.issue("bob", authority(team)).certificate_pem)
    assert "the certificate of bob" in refusal(team) and "the roster says" in refusal(team)


@pytest.mark.parametrize("name", ["bob", "world"])
def test_an_expired_certificate_is_refused_by_name(team: Path, name: str) -> None:
    (team / f"{name}.pem").write_bytes(certificate_for(name, p256(), -3, -1))
    pin(team, name)
    assert re.search(rf"certificate of {name}, .* expired on \d{{4}}-\d\d-\d\d; .*", refusal(team))


def test_a_certificate_of_tomorrow_is_refused(team: Path) -> None:
    (team / "bob.pem").write_bytes(certificate_for("bob", p256(), 1, 2))
    pin(team, "bob")
    assert "certificate of bob" in refusal(team) and "valid only from" in refusal(team)


@pytest.mark.parametrize(
    "key", [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())]
)
def test_a_key_that_would_let_old_tls_in_is_refused(team: Path, key: Any) -> None:
    (team / "bob.pem").write_bytes(certificate_for("bob", key))
    pin(team, "bob")
    assert "has no ECDSA P-256 key" in refusal(team)


def test_a_party_may_bring_a_certificate_of_its_own(team: Path) -> None:
    key = p256()
    (team / "bob.pem").write_bytes(certificate_for("bob", key))
    pin(team, "bob")
    member = roster_file.read(team / "team.toml").member("bob")
    spoil(team / "bob.key", keys.Pair(None, key).key_pem)  # type: ignore[arg-type]
    assert roster_file.private_key(team / "bob.key", member)


def test_nobody_is_two_parties(team: Path) -> None:
    """Whoever held two of the keys could open more of the sum than is its own."""
    key = p256()
    for name in ("alice", "bob"):
        (team / f"{name}.pem").write_bytes(certificate_for(name, key))
        pin(team, name)
    assert "alice and bob have the key of their certificates in common" in refusal(team)


def test_a_second_certificate_in_the_same_file_is_never_trusted(team: Path) -> None:
    path = team / "bob.pem"
    path.write_bytes(path.read_bytes() + (team / "authority.pem").read_bytes())
    assert "must be exactly one certificate" in refusal(team)


def test_text_beside_a_certificate_does_not_reach_whoever_trusts_it(team: Path) -> None:
    path = team / "bob.pem"
    plain = path.read_bytes()
    path.write_bytes(b"a note\n" + plain + b"another\n")
    assert roster_file.read(team / "team.toml").member("bob").certificate == plain
