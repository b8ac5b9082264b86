"""Keys and certificates of a team: who can read them, and that nothing is overwritten."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from network_keys import PARTIES, WORLD, authority, edit, two
from support import cli, finish, python

from pevdn.config import experiment as configuration
from pevdn.errors import PevdnError, UsageError
from pevdn.network import keys, roster, roster_file

# --- what is made ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [WORLD, None])
def test_what_is_written_is_read_back_the_same(tmp_path: Path, world: str | None) -> None:
    config = configuration.make(
        "pe-vdn-c", "toy:two-step", 7, seed=5, settings={"learning_rate": 1e-05, "anchor": True}
    )
    out = tmp_path / "a" / "b"
    made = keys.create(out, config, PARTIES, world, "pairwise-masks", 12.5, True, 30)
    found = roster_file.read(out / "team.toml")
    assert found == made
    assert found.config == roster.with_randomness(config, rehearsal=True)
    assert found.rehearsal and found.patience == 12.5
    assert found.names == ("alice", "bob", *(["world"] if world else []))
    assert found.member("bob").address == "10.0.0.3:7700" and found.index("bob") == 1
    assert (found.world is None) == (world is None)


def test_a_roster_may_leave_out_what_has_a_default(team: Path) -> None:
    whole = roster_file.read(team / "team.toml")
    edit(team, r"^(rehearsal|seed|patience) = .*\n", "", count=3)
    edit(team, r"^\[settings\]\n(.+\n)*", "")
    assert roster_file.read(team / "team.toml") == whole


def test_a_digest_may_be_written_as_openssl_writes_it(team: Path) -> None:
    whole = roster_file.read(team / "team.toml")
    digest = whole.member("bob").fingerprint
    pairs = ":".join(digest[i : i + 2] for i in range(0, 64, 2)).upper()
    edit(team, digest, pairs)
    assert roster_file.read(team / "team.toml") == whole


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

    monkeypatch.setattr(roster_file.os, "open", spy)
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
    written = {name: flags for name, (flags, _) in opened.items() if flags & os.O_ACCMODE}
    assert set(written) == set(files)
    assert all(flags & os.O_EXCL and flags & os.O_CREAT for flags in written.values())
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
    for member in roster_file.read(team / "team.toml").members:
        leaf = x509.load_pem_x509_certificate(member.certificate)
        leaf.verify_directly_issued_by(root)
        names = leaf.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        assert [name.value for name in names] == [member.name]
        assert roster_file._dns_names(leaf) == [member.name]
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
    found = roster_file.read(team / "team.toml")

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
    with pytest.raises(UsageError, match=rf"{file} exists already.*choose another --out"):
        keys.create(tmp_path, two(), PARTIES, WORLD)
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text() == "mine"


def test_a_link_to_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "alice.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists already"):
        keys.create(tmp_path, two(), PARTIES)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(UsageError, match="exists already"):
        roster_file.new_file(tmp_path / "alice.key", b"x", 0o600)
    assert not (tmp_path / "elsewhere").exists()


def test_if_writing_fails_no_key_is_left_behind_and_what_others_wrote_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(*_: Any) -> None:
        (tmp_path / "bob.pem").write_text("somebody else's")

    monkeypatch.setattr(keys, "_check_free", meddle)
    with pytest.raises(UsageError, match=r"bob\.pem exists already"):
        keys.create(tmp_path, two(), PARTIES, WORLD)
    assert [path.name for path in tmp_path.iterdir()] == ["bob.pem"]
    assert (tmp_path / "bob.pem").read_text() == "somebody else's"


def test_an_interrupted_command_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(roster_file.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        keys.create(tmp_path / "keys", two(), PARTIES, WORLD)
    assert not list((tmp_path / "keys").iterdir())


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(roster_file.os, "fsync", full)
    with pytest.raises(PevdnError, match=r"^cannot write .*: No space left on device\.$"):
        keys.create(tmp_path / "keys", two(), PARTIES, WORLD)
    assert not list((tmp_path / "keys").iterdir())


# --- `pevdn keys` -----------------------------------------------------------------------------

TYPED = ["keys", "pe-vdn-b", "--env=toy:two-step"]
BOTH = ["--party=alice=10.0.0.2:7700", "--party=bob=10.0.0.3:7700"]


def test_keys_makes_a_team_that_can_be_read(tmp_path: Path) -> None:
    out = tmp_path / "team"
    how = ["--world=10.0.0.1:7700", "--steps=500", "--mode=pairwise-masks", "--set", "gamma=0.9"]
    said = cli(*TYPED, f"--out={out}", *BOTH, *how, "--days=9", "--patience=60", "--json")
    assert said.code == 0 and said.err == ""
    document = json.loads(said.out)
    found = roster_file.read(Path(document["roster"]))
    assert found.config == configuration.make(
        "pe-vdn-b", "toy:two-step", 500, settings={"gamma": 0.9, "randomness": "os"}
    )
    assert (found.mode, found.patience, found.rehearsal) == ("pairwise-masks", 60.0, False)
    assert document["run"] == found.run.hex() and document["agreement"] == found.agreement
    assert [row["name"] for row in document["members"]] == ["alice", "bob", "world"]
    for row in document["members"]:
        assert roster_file.private_key(Path(row["key"]), found.member(row["name"]))
        assert row["sha256"] == found.member(row["name"]).fingerprint
        assert 8 <= (datetime.fromisoformat(row["expires"]) - datetime.now(UTC)).days <= 9
    assert "PRIVATE" not in said.out


def test_keys_says_what_to_hand_to_whom(tmp_path: Path) -> None:
    said = cli(*TYPED, "--out", tmp_path, *BOTH, "--rehearsal", "--seed=4")
    assert said.code == 0 and "alice" in said.out and "10.0.0.3:7700" in said.out
    assert "give it to NAME only" in said.out and "nothing is hidden" in said.out
    found = roster_file.read(tmp_path / "team.toml")
    assert found.rehearsal and found.config.seed == 4 and found.config.steps == 400_000


def test_keys_takes_a_preset(tmp_path: Path) -> None:
    typed = ["keys", "pe-vdn-c", "--env=smax-sc2:3m", "--preset=team-4", *BOTH]
    said = cli(*typed, "--party=carol=10.0.0.4:7700", "--out", tmp_path, "--set=delta=1e-3")
    assert said.code == 0 and "2.5e-07 would do" in said.err
    config = roster_file.read(tmp_path / "team.toml").config
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
    assert said.code == 1 and "cannot create" in said.sentence


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
