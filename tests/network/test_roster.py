"""What the members of a team agree on, and how differences are reported."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from network_keys import PARTIES, edit, two

from pevdn.config.settings import setting_fields
from pevdn.errors import UsageError
from pevdn.network import keys, roster, roster_file
from pevdn.network.roster import Roster


def _other(name: str, value: Any) -> Any:
    choices = setting_fields()[name].metadata["choices"]
    if choices:
        return next(choice for choice in choices if choice != value)
    return not value if isinstance(value, bool) else value + 1


@pytest.fixture(scope="module")
def agreed(pristine: Path) -> Roster:
    return roster_file.read(pristine / "team.toml")


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
    moved = roster_file.read(team / "team.toml")
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


def test_a_roster_of_an_earlier_version_is_named_as_such(team: Path) -> None:
    roster = team / "team.toml" if team.is_dir() else team
    text = roster.read_text().replace("[settings]\n", '[settings]\nbuffer = "device"\n')
    assert "buffer" in text
    roster.write_text(text)
    with pytest.raises(UsageError, match=r"earlier version of pevdn \(it sets buffer\)"):
        roster_file.read(roster)
