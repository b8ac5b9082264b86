"""Rosters and keys: who is let in, what is agreed on, and that no private key is ever open."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import cli, finish, python

from pevdn.config import experiment as configuration
from pevdn.config.experiment import Config
from pevdn.config.settings import setting_fields
from pevdn.errors import PevdnError, UsageError

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from pevdn.network import keys, roster
from pevdn.network.roster import Roster

PARTIES = [("alice", "10.0.0.2:7700"), ("bob", "10.0.0.3:7700")]
WORLD = "10.0.0.1:7700"


def two(**changes: Any) -> Config:
    return configuration.make("pe-vdn-b", "toy:two-step", 1000, **changes)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("team") / "keys"
    keys.create(out, two(), PARTIES, WORLD)
    return out


@pytest.fixture
def team(pristine: Path, tmp_path: Path) -> Path:
    """A team of two and a world, to be spoilt."""
    out = tmp_path / "keys"
    out.mkdir()
    for file in pristine.iterdir():
        target = out / file.name
        target.write_bytes(file.read_bytes())
        target.chmod(stat.S_IMODE(file.stat().st_mode))
    return out


def edit(team: Path, pattern: str, text: str, count: int = 1) -> None:
    path = team / "team.toml"
    changed, hits = re.subn(pattern, lambda _: text, path.read_text(), count=count, flags=re.M)
    assert hits, pattern
    path.write_text(changed)


def refusal(team: Path) -> str:
    """The one sentence in which a roster is refused; it names the file."""
    with pytest.raises(UsageError) as caught:
        roster.read(team / "team.toml")
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


# --- what is made ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [WORLD, None])
def test_what_is_written_is_read_back_the_same(tmp_path: Path, world: str | None) -> None:
    config = configuration.make(
        "pe-vdn-c", "toy:two-step", 7, seed=5, settings={"learning_rate": 1e-05, "anchor": True}
    )
    out = tmp_path / "a" / "b"
    made = keys.create(out, config, PARTIES, world, "pairwise-masks", 12.5, True, 30)
    found = roster.read(out / "team.toml")
    assert found == made
    assert found.config == roster.with_randomness(config, rehearsal=True)
    assert found.rehearsal and found.patience == 12.5
    assert found.names == ("alice", "bob", *(["world"] if world else []))
    assert found.member("bob").address == "10.0.0.3:7700" and found.index("bob") == 1
    assert (found.world is None) == (world is None)


def test_a_roster_may_leave_out_what_has_a_default(team: Path) -> None:
    whole = roster.read(team / "team.toml")
    edit(team, r"^(rehearsal|seed|patience) = .*\n", "", count=3)
    edit(team, r"^\[settings\]\n(.+\n)*", "")
    assert roster.read(team / "team.toml") == whole


def test_a_digest_may_be_written_as_openssl_writes_it(team: Path) -> None:
    whole = roster.read(team / "team.toml")
    digest = whole.member("bob").fingerprint
    pairs = ":".join(digest[i : i + 2] for i in range(0, 64, 2)).upper()
    edit(team, digest, pairs)
    assert roster.read(team / "team.toml") == whole


def test_only_its_owner_can_read_a_private_key_even_without_a_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[str, tuple[int, int]] = {}
    real = os.open

    def spy(path: Any, flags: int, mode: int = 0o777, **how: Any) -> int:
        opened[Path(path).name] = (flags, mode)
        descriptor = real(path, flags, mode, **how)
        if str(path).endswith(".key"):
            assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
            assert os.fstat(descriptor).st_size == 0
        return descriptor

    monkeypatch.setattr(roster.os, "open", spy)
    before = os.umask(0)
    try:
        keys.create(tmp_path / "keys", two(), PARTIES, WORLD)
    finally:
        os.umask(before)
    monkeypatch.undo()
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "keys").iterdir()}
    private = {f"{name}.key" for name in ("alice", "bob", "world", "authority")}
    assert {name for name, mode in files.items() if mode == 0o600} == private
    assert set(files) == private | {n.replace(".key", ".pem") for n in private} | {"team.toml"}
    assert all(flags & os.O_EXCL and flags & os.O_CREAT for flags, _ in opened.values())
    assert all(opened[name][1] == 0o600 for name in private)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_an_empty_directory_for_keys_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o755)
    keys.create(tmp_path / "keys", two(), PARTIES)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_no_private_key_is_in_anything_that_is_handed_to_all(team: Path) -> None:
    secrets = [
        "".join(file.read_text().splitlines()[1:-1])
        for file in team.iterdir()
        if file.suffix == ".key"
    ]
    assert len(secrets) == 4 and len(set(secrets)) == 4
    for file in team.iterdir():
        if file.suffix != ".key":
            text = file.read_text()
            assert "PRIVATE" not in text
            assert not any(secret in "".join(text.splitlines()) for secret in secrets)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
@pytest.mark.parametrize("name", ["alice", "bob", "world"])
def test_openssl_verifies_a_certificate_for_both_ends(team: Path, name: str) -> None:
    for purpose in ("sslserver", "sslclient"):
        said = subprocess.run(
            [
                *("openssl", "verify", "-x509_strict", "-purpose", purpose),
                *("-verify_hostname", name, "-CAfile", team / "authority.pem"),
                team / f"{name}.pem",
            ],
            capture_output=True,
            text=True,
        )
        assert said.returncode == 0, said.stderr


def test_certificates_are_what_the_contract_says(team: Path) -> None:
    root = authority(team).certificate
    basic = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical and basic.value.ca and basic.value.path_length == 0
    assert 3640 < (root.not_valid_after_utc - datetime.now(UTC)).days <= 3650
    root.verify_directly_issued_by(root)
    serials = {root.serial_number}
    for member in roster.read(team / "team.toml").members:
        leaf = x509.load_pem_x509_certificate(member.certificate)
        leaf.verify_directly_issued_by(root)
        names = leaf.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        assert [name.value for name in names] == [member.name]
        assert roster._dns_names(leaf) == [member.name]
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert isinstance(leaf.public_key(), ec.EllipticCurvePublicKey)
        assert 364 <= (leaf.not_valid_after_utc - datetime.now(UTC)).days <= 365
        assert leaf.not_valid_before_utc < datetime.now(UTC)
        serials.add(leaf.serial_number)
    assert len(serials) == 4


def test_no_certificate_outlives_the_authority(team: Path) -> None:
    pair = keys.issue("alice", authority(team), 3650)
    assert pair.certificate.not_valid_after_utc == authority(team).certificate.not_valid_after_utc


def test_two_members_can_talk_and_each_trusts_the_one_pinned_certificate_alone(team: Path) -> None:
    found = roster.read(team / "team.toml")

    def context(side: int, me: str, peer: str) -> ssl.SSLContext:
        made = ssl.SSLContext(side)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.verify_mode = ssl.CERT_REQUIRED
        made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        made.load_verify_locations(cadata=found.member(peer).certificate.decode())
        made.load_cert_chain(team / f"{me}.pem", team / f"{me}.key")
        return made

    def talk(client: str) -> bytes:
        """What bob gets, who expects alice."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.settimeout(10)

        def call() -> None:
            with ours:
                try:
                    wrapped = context(ssl.PROTOCOL_TLS_CLIENT, client, "bob").wrap_socket(
                        ours, server_hostname="bob"
                    )
                    wrapped.sendall(b"hello")
                    wrapped.close()
                except OSError:
                    pass

        caller = threading.Thread(target=call)
        caller.start()
        try:
            with context(ssl.PROTOCOL_TLS_SERVER, "bob", "alice").wrap_socket(
                theirs, server_side=True
            ) as heard:
                return heard.recv(5)
        finally:
            theirs.close()
            caller.join()

    assert talk("alice") == b"hello"
    with pytest.raises(ssl.SSLError):
        talk("world")  # signed by the same authority, but not the pinned one


# --- nothing is overwritten ------------------------------------------------------------------


@pytest.mark.parametrize("file", ["team.toml", "authority.key", "alice.key", "bob.pem"])
def test_nothing_is_overwritten_and_nothing_is_added(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("mine")
    with pytest.raises(UsageError, match=rf"{file} is there already.*choose another --out"):
        keys.create(tmp_path, two(), PARTIES, WORLD)
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text() == "mine"


def test_a_link_to_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "alice.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="there already"):
        keys.create(tmp_path, two(), PARTIES)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(UsageError, match="there already"):
        roster.new_file(tmp_path / "alice.key", b"x", 0o600)
    assert not (tmp_path / "elsewhere").exists()


def test_if_writing_fails_no_key_is_left_behind_and_what_others_wrote_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(*_: Any) -> None:
        (tmp_path / "bob.pem").write_text("somebody else's")

    monkeypatch.setattr(keys, "_check_free", meddle)
    with pytest.raises(UsageError, match=r"bob\.pem is there already"):
        keys.create(tmp_path, two(), PARTIES, WORLD)
    assert [path.name for path in tmp_path.iterdir()] == ["bob.pem"]
    assert (tmp_path / "bob.pem").read_text() == "somebody else's"


def test_an_interrupted_command_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(roster.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        keys.create(tmp_path / "keys", two(), PARTIES, WORLD)
    assert not list((tmp_path / "keys").iterdir())


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(roster.os, "fsync", full)
    with pytest.raises(PevdnError, match=r"^cannot write .*: No space left on device\.$"):
        keys.create(tmp_path / "keys", two(), PARTIES, WORLD)
    assert not list((tmp_path / "keys").iterdir())


# --- private keys ----------------------------------------------------------------------------


def test_a_member_gets_its_private_key(team: Path) -> None:
    found = roster.read(team / "team.toml")
    for name in found.names:
        path = team / f"{name}.key"
        assert roster.private_key(path, found.member(name)) == path.read_bytes()
    (team / "bob.key").chmod(0o400)
    assert roster.private_key(team / "bob.key", found.member("bob"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o610])
def test_a_private_key_that_others_can_open_is_refused(team: Path, mode: int) -> None:
    (team / "alice.key").chmod(mode)
    with pytest.raises(UsageError, match=rf"mode {mode:o}.*chmod 600 .*alice.key"):
        roster.private_key(team / "alice.key", roster.read(team / "team.toml").member("alice"))


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
        (lambda path: spoil(path, b""), "not a private key"),
        (lambda path: spoil(path, b"\x00\xff" * 99), "not a private key"),
        (lambda path: spoil(path, path.with_suffix(".pem").read_bytes()), "not a private key"),
        (lambda path: spoil(path, _locked()), "without a password"),
        (lambda path: spoil(path, (path.parent / "bob.key").read_bytes()), "does not belong to"),
        (lambda path: spoil(path, path.read_bytes()[:-60]), "not a private key"),
    ],
    ids=["missing", "folder", "empty", "noise", "certificate", "locked", "bob's", "cut"],
)
def test_a_wrong_private_key_is_one_sentence_without_the_key(
    team: Path, spoiler: Callable[[Path], Any], words: str
) -> None:
    member = roster.read(team / "team.toml").member("alice")
    spoiler(team / "alice.key")
    with pytest.raises(UsageError, match=words) as caught:
        roster.private_key(team / "alice.key", member)
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
        (r"^algorithm = .*", 'algorithm = "vdn"', "everything in one place"),
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
        (r"^name = .*", 'name = "Alice"', "the party name 'Alice' has to be"),
        (r"^name = .*", 'name = ""', "the party name '' has to be"),
        (r"^name = .*", 'name = "../alice"', "the party name '../alice' has to be"),
        (r"^name = .*", 'name = "alice\\n"', r"the party name 'alice\\n' has to be"),
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
        (r"10\.0\.0\.2:7700", "0.0.0.0:7700", "nobody can call 0.0.0.0"),
        (r"10\.0\.0\.2:7700", "[::]:7700", "nobody can call ::"),
        (r"^address", "adress", r"unknown key of \[world\] 'adress'; did you mean 'address'"),
        (r"^seed = .*", "seed = 0\nworld = 1", "this is not TOML"),
        (r"^sha256 = .*\n", "", r"the key of \[world\] 'sha256' is missing"),
        (r'^certificate = "alice.*', 'certificate = "al.pem"', "alice, .*al.pem, cannot be read"),
        (r'^certificate = "alice.*', 'certificate = "bob.pem"', "certificate of alice.*the sha256"),
        (r'^certificate = "alice.*', 'certificate = "alice.key"', "is not one certificate"),
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
    assert roster.read(team / "team.toml").member("alice").address == address


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
        roster.read(path)
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
    assert "is not made out to 'alice'" in refusal(team)


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
    assert "another kind than ECDSA P-256" in refusal(team)


def test_a_party_may_bring_a_certificate_of_its_own(team: Path) -> None:
    key = p256()
    (team / "bob.pem").write_bytes(certificate_for("bob", key))
    pin(team, "bob")
    member = roster.read(team / "team.toml").member("bob")
    spoil(team / "bob.key", keys.Pair(None, key).key_pem)  # type: ignore[arg-type]
    assert roster.private_key(team / "bob.key", member)


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
    assert "is not one certificate" in refusal(team)


def test_text_beside_a_certificate_does_not_reach_whoever_trusts_it(team: Path) -> None:
    path = team / "bob.pem"
    plain = path.read_bytes()
    path.write_bytes(b"a note\n" + plain + b"another\n")
    assert roster.read(team / "team.toml").member("bob").certificate == plain


# --- the agreement ---------------------------------------------------------------------------


def _other(name: str, value: Any) -> Any:
    choices = setting_fields()[name].metadata["choices"]
    if choices:
        return next(choice for choice in choices if choice != value)
    return not value if isinstance(value, bool) else value + 1


@pytest.fixture(scope="module")
def agreed(pristine: Path) -> Roster:
    return roster.read(pristine / "team.toml")


def changed(found: Roster, **values: Any) -> Roster:
    return dataclasses.replace(found, **values)


def test_every_setting_is_agreed_on(agreed: Roster) -> None:
    runs = {agreed.run}
    for name, value in dataclasses.asdict(agreed.config.settings).items():
        settings = dataclasses.replace(agreed.config.settings, **{name: _other(name, value)})
        other = changed(agreed, config=dataclasses.replace(agreed.config, settings=settings))
        assert len(roster.differences(agreed.agreement, other.agreement)) == 1
        runs.add(other.run)
    assert len(runs) == 1 + len(setting_fields()) and all(len(run) == 32 for run in runs)


def variants(found: Roster) -> Iterator[Roster]:
    alice, bob = found.parties
    config = found.config
    yield changed(found, team="0" * 32)
    yield changed(found, mode="pairwise-masks")
    yield changed(found, rehearsal=True)
    yield changed(found, parties=(bob, alice))
    yield changed(found, world=None)
    yield changed(found, parties=(dataclasses.replace(alice, fingerprint="0" * 64), bob))
    yield changed(found, parties=(dataclasses.replace(alice, name="eve"), bob))
    yield changed(found, config=dataclasses.replace(config, algorithm="pe-vdn-a"))
    yield changed(found, config=dataclasses.replace(config, env="toy:coordination"))
    yield changed(found, config=dataclasses.replace(config, steps=1001))


def test_everything_else_about_the_training_is_agreed_on(agreed: Roster) -> None:
    others = list(variants(agreed))
    assert len({other.run for other in others} | {agreed.run}) == len(others) + 1
    assert all(roster.differences(agreed.agreement, other.agreement) for other in others)


def test_machines_may_move_and_patience_is_everyones_own(team: Path, agreed: Roster) -> None:
    edit(team, r"10\.0\.0\.2:7700", "elsewhere.example:9")
    edit(team, r"^patience = .*", "patience = 7")
    (team / "bob.pem").rename(team / "b.pem")
    edit(team, '"bob.pem"', '"b.pem"')
    moved = roster.read(team / "team.toml")
    assert moved.member("alice") != agreed.member("alice") and moved.patience == 7
    assert moved.run == agreed.run
    assert roster.differences(agreed.agreement, moved.agreement) == []


def test_a_seed_is_agreed_on_in_a_rehearsal_only(agreed: Roster) -> None:
    seeded = dataclasses.replace(agreed.config, seed=9)
    assert changed(agreed, config=seeded).run == agreed.run
    assert changed(agreed, config=seeded, rehearsal=True).run != changed(agreed, rehearsal=True).run


def test_two_teams_that_want_the_same_are_two_teams(tmp_path: Path) -> None:
    runs = {keys.create(tmp_path / n, two(), PARTIES).run for n in ("a", "b")}
    assert len(runs) == 2


def test_an_agreement_survives_the_wire(agreed: Roster) -> None:
    there = json.loads(roster.canonical(agreed.agreement))
    assert roster.differences(agreed.agreement, there) == []
    assert roster.canonical(there) == roster.canonical(agreed.agreement)


def test_differences_are_in_words() -> None:
    mine = {"settings": {"gamma": 0.9, "anchor": True}, "mode": "shares", "seed": 1}
    theirs = {"settings": {"gamma": 0.95, "anchor": 1}, "mode": "shares", "new": "x"}
    assert roster.differences(mine, theirs) == [
        "settings.gamma is 0.9 here and 0.95 there",
        "settings.anchor is True here and 1 there",
        "seed is 1 here and missing there",
        "new is missing here and 'x' there",
    ]


def test_what_a_stranger_says_cannot_flood_or_forge_the_words(agreed: Roster) -> None:
    strange: list[Any] = [None, [], "x" * 10**6, {"\n\x1b[2J" * 99: "\x1b[2J\n" * 10**5}]
    strange.append({str(n): n for n in range(10**5)})
    strange.append({**agreed.agreement, "settings": [[[[["deep"]]]]]})
    for theirs in strange:
        found = roster.differences(agreed.agreement, theirs)
        assert 0 < len(found) <= roster.MOST_DIFFERENCES
        assert all(line.isprintable() and len(line) < 3000 for line in found)


def test_an_unknown_member_is_named(agreed: Roster) -> None:
    with pytest.raises(UsageError, match="unknown member 'alise'; did you mean 'alice'"):
        agreed.member("alise")
    with pytest.raises(UsageError, match="unknown party 'world'"):
        agreed.index("world")


# --- the command line ------------------------------------------------------------------------

TYPED = ["keys", "pe-vdn-b", "--env=toy:two-step"]
BOTH = ["--party=alice=10.0.0.2:7700", "--party=bob=10.0.0.3:7700"]


def test_keys_makes_a_team_that_can_be_read(tmp_path: Path) -> None:
    out = tmp_path / "team"
    how = ["--world=10.0.0.1:7700", "--steps=500", "--mode=pairwise-masks", "--set", "gamma=0.9"]
    said = cli(*TYPED, f"--out={out}", *BOTH, *how, "--days=9", "--patience=60", "--json")
    assert said.code == 0 and said.err == ""
    document = json.loads(said.out)
    found = roster.read(Path(document["roster"]))
    assert found.config == configuration.make(
        "pe-vdn-b", "toy:two-step", 500, settings={"gamma": 0.9, "randomness": "os"}
    )
    assert (found.mode, found.patience, found.rehearsal) == ("pairwise-masks", 60.0, False)
    assert document["run"] == found.run.hex() and document["agreement"] == found.agreement
    assert [row["name"] for row in document["members"]] == ["alice", "bob", "world"]
    for row in document["members"]:
        assert roster.private_key(Path(row["key"]), found.member(row["name"]))
        assert row["sha256"] == found.member(row["name"]).fingerprint
        assert 8 <= (datetime.fromisoformat(row["expires"]) - datetime.now(UTC)).days <= 9
    assert "PRIVATE" not in said.out


def test_keys_says_what_to_hand_to_whom(tmp_path: Path) -> None:
    said = cli(*TYPED, "--out", tmp_path, *BOTH, "--rehearsal", "--seed=4")
    assert said.code == 0 and "alice" in said.out and "10.0.0.3:7700" in said.out
    assert "give it to NAME only" in said.out and "nothing is hidden" in said.out
    found = roster.read(tmp_path / "team.toml")
    assert found.rehearsal and found.config.seed == 4 and found.config.steps == 400_000


def test_keys_takes_a_preset(tmp_path: Path) -> None:
    typed = ["keys", "pe-vdn-c", "--env=smax-sc2:3m", "--preset=team-4", *BOTH]
    said = cli(*typed, "--party=carol=10.0.0.4:7700", "--out", tmp_path, "--set=delta=1e-3")
    assert said.code == 0 and "2.5e-07 would do" in said.err
    config = roster.read(tmp_path / "team.toml").config
    assert config.settings.noise_multiplier == 2.577 and config.algorithm == "pe-vdn-c"


def test_keys_never_overwrites_a_team(team: Path) -> None:
    before = {file.name: file.read_bytes() for file in team.iterdir()}
    said = cli(*TYPED, "--out", team, *BOTH)
    assert said.code == 2 and "never overwritten; choose another --out" in said.sentence
    assert {file.name: file.read_bytes() for file in team.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--party=alice=10.0.0.2:7700"], "at least two parties"),
        ([*BOTH, "--party=carol=c:1"], "3 parties, but toy:two-step has 2 agents"),
        ([*BOTH, "--env=smax-sc2:3m"], "2 parties, but smax-sc2:3m has 3 agents"),
        ([*BOTH, "--env=toy:three-step"], "unknown world"),
        (["--party=alice", "--party=bob=b:1"], "--party got 'alice', but takes NAME=HOST:PORT"),
        (["--party=a=h:1", "--party=a=h:2"], "two parties 'a' have the name in common"),
        (["--party=a=h:1", "--party=b=H:1"], "a and b have the address in common"),
        (["--party=a=h:1", "--party=b=h:99999"], "from 1 to 65535"),
        ([*BOTH, "--world=10.0.0.2:7700"], "alice and world have the address in common"),
        ([*BOTH, "--world="], "the address of world is '', but must be host:port"),
        ([*BOTH, "--mode=masks"], "unknown mode 'masks'; did you mean 'pairwise-masks'?"),
        ([*BOTH, "--days=0"], "days is 0, but must be at least 1"),
        ([*BOTH, "--days=9999"], "days is 9999, but must be at most 3650"),
        ([*BOTH, "--patience=-1"], "patience is -1.0"),
        ([*BOTH, "--patience=nan"], "patience is 'nan'"),
        ([*BOTH, "--seed=3"], "only a rehearsal has a seed"),
        ([*BOTH, "--set", "gama=1"], "did you mean 'gamma'"),
        ([*BOTH, "--preset=team-4"], "is for pe-vdn-c, not for pe-vdn-b"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    said = cli(*TYPED, "--out", tmp_path / "team", *arguments)
    assert said.code == 2 and words in said.sentence, said
    assert not (tmp_path / "team").exists()


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = cli(*TYPED, "--out", tmp_path / "file", *BOTH)
    assert said.code == 2 and "is a file; choose another directory" in said.sentence
    said = cli(*TYPED, "--out", tmp_path / "file" / "below", *BOTH)
    assert said.code == 1 and "cannot make" in said.sentence


def test_without_cryptography_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['cryptography'] = None; from pevdn.cli import main; main()"
    said = finish(python(program, *TYPED, "--out", tmp_path / "team", *BOTH))
    assert said.code == 1 and "install pevdn[network]" in said.sentence


def test_keys_does_not_start_jax(tmp_path: Path) -> None:
    program = """
import sys
from pevdn.cli import main
try:
    main()
finally:
    print(sorted({"jax", "grpc"} & set(sys.modules)), file=sys.stderr)
"""
    said = finish(python(program, *TYPED, "--out", tmp_path / "team", *BOTH))
    assert said.code == 0 and said.err == "[]\n"
