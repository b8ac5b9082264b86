"""Which members train together, and what happens while one is missing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from network_team import (
    Heard,
    Killed,
    assert_one_sentence,
    is_exactly,
    lie,
    listen,
    make_team,
    members_of,
    party_of,
    play,
    play_all,
    world_of,
)

from pevdn.network import group, membership
from pevdn.network import wire_pb2 as wire

pytestmark = pytest.mark.usefixtures("shared_programs")


def older(hello: wire.Hello) -> None:
    hello.version = "0.0.1"


def other_protocol(hello: wire.Hello) -> None:
    hello.protocol += 1


def slow(hello: wire.Hello) -> None:
    hello.clock -= 500


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (older, "bob runs pevdn 0.0.1"),
        (other_protocol, f"(protocol {membership.PROTOCOL + 1})"),
        (slow, "differ by 500 seconds, but may differ by 120"),
    ],
)
def test_other_versions_protocols_and_clocks_are_refused_before_the_first_episode(
    change: Any, what: str, tmp_path: Path
) -> None:
    team = make_team(tmp_path / "team", patience=3)
    members = members_of(team)
    heard = listen(members, team)

    def changed(to: str, envelope: wire.Envelope) -> None:
        if envelope.HasField("hello"):
            change(envelope.hello)

    lie(members["bob"], changed)
    said = play(members)
    assert set(said) == set(members)
    for text in said.values():
        assert_one_sentence(text)
        assert "bob" in text and what in text
    assert_before_the_first_episode(heard)


def test_other_settings_are_refused_before_the_first_episode(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", patience=5)
    settings = dataclasses.replace(team.config.settings, gamma=0.5)
    other = dataclasses.replace(team, config=dataclasses.replace(team.config, settings=settings))
    members = {"alice": party_of(team, "alice"), "bob": party_of(other, "bob")}
    members["world"] = world_of(team)  # type: ignore[assignment]
    heard = listen(members, team)
    said = play(members)
    assert set(said) == set(members)
    for text in said.values():
        assert_one_sentence(text)
        assert "bob" in text and "have different rosters: settings.gamma is " in text
        assert "0.5" in text
    assert_before_the_first_episode(heard)


def assert_before_the_first_episode(heard: Heard) -> None:
    kinds = set()
    for _, _, data in heard.said:
        envelope = wire.Envelope()
        if is_exactly(envelope, data):
            kinds.add(envelope.WhichOneof("body"))
    assert kinds <= {"hello", "farewell", None}
    assert all(member.state.progress.step == 0 for member in heard.members.values())


# --- missing members --------------------------------------------------------------------------


def test_the_clock_of_one_that_waited_for_long_is_not_thought_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "CLOCKS_APART", 1.0)
    monkeypatch.setattr(group, "GREETING", 0.3)
    team = make_team(tmp_path / "team", steps=4)
    members = members_of(team)
    run = members["bob"].run

    async def late() -> None:
        await asyncio.sleep(2.5)
        await run()

    members["bob"].run = late
    assert play(members) == {}


def test_one_that_never_comes_is_named_by_the_others(tmp_path: Path) -> None:
    missing = ["bob", "world"]
    teams = [members_of(make_team(tmp_path / name, patience=2)) for name in missing]
    for name, members in zip(missing, teams, strict=True):
        del members[name]
    for name, members, said in zip(missing, teams, play_all(teams, 20), strict=True):
        assert set(said) == set(members)
        for text in said.values():
            assert_one_sentence(text)
            assert f"{name} did not answer for 2 seconds; everything is saved" in text


def dies_for_good(member: Any, after: int) -> None:
    """Kills a member at one of its messages."""
    run, send, sent = member.run, member.group.transport.send, 0

    async def until_it_dies(*args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent > after:
            raise Killed
        return await send(*args, **options)

    async def gone() -> None:
        with contextlib.suppress(Killed):
            await run()

    member.group.transport.send, member.run = until_it_dies, gone


def test_one_that_never_comes_back_is_named_by_the_others_who_save(tmp_path: Path) -> None:
    cases = [("bob", 9), ("bob", 24), ("bob", 25), ("world", 20)]
    rosters = [make_team(tmp_path / f"{name}-{after}", patience=3) for name, after in cases]
    teams = [members_of(team) for team in rosters]
    for (name, after), members in zip(cases, teams, strict=True):
        dies_for_good(members[name], after)
    ended = play_all(teams, 30)
    for (name, _), team, members, said in zip(cases, rosters, teams, ended, strict=True):
        assert set(said) == set(members) - {name}
        for text in said.values():
            assert_one_sentence(text)
            assert f"{name} did not answer for 3 seconds; everything is saved" in text
        alice = party_of(team, "alice")
        assert alice.state.progress == members["alice"].state.progress
        assert json.loads((alice.folder / "status.json").read_text())["state"] == "stopped"
