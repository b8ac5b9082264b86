"""A party's state: what it recovers from its folder, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from network_team import packed_episodes

from pevdn.agent.evaluation import Score
from pevdn.config import experiment as configuration
from pevdn.errors import PevdnError, UsageError
from pevdn.network import keys, roster_file
from pevdn.network.party import Party
from pevdn.network.recovery import Journal, Outcome
from pevdn.network.roster import Roster

PLACES = [("alice", "127.0.0.1:7701"), ("bob", "127.0.0.1:7702")]  # no process listens there


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Roster:
    settings = {
        "hidden_size": 4,
        "buffer_size": 4,
        "expected_batch_size": 4,
        "parallel_episodes": 2,
        "update_every": 2,
        "learning_starts": 4,
    }
    config = configuration.make("pe-vdn-b", "toy:two-step", 1000, 1, 0, settings)
    return keys.create(tmp_path_factory.mktemp("team") / "keys", config, PLACES, "127.0.0.1:7703")


def party(team: Roster, folder: Path) -> Party:
    key = roster_file.private_key(team.path.parent / "alice.key", team.member("alice"))
    return Party(team, "alice", key, folder)


def played(team: Roster, folder: Path, blocks: int) -> Party:
    """A party that has completed steps of play without its peers."""
    alice = party(team, folder)
    alice.state._score(Score(0.0, 0.0, 2.0))
    alice.state.save()
    for block in range(blocks):
        alice.state.journal.write_block(block, packed_episodes(2, 2), bytes(32))
        nonces = {"alice": bytes(32), "bob": bytes(32)}
        done = Outcome(alice.state.progress.step + 1, "play", nonces=nonces)
        alice.state.journal.append(done)
        alice.state.apply(done)
    return alice


def test_a_party_continues_from_its_folder(team: Roster, tmp_path: Path) -> None:
    alice = played(team, tmp_path, 1)
    again = party(team, tmp_path)
    assert again.state.progress == alice.state.progress and again.state.progress.blocks == 1
    assert again.state.replay.rows == alice.state.replay.rows


@pytest.mark.parametrize("saved", [False, True])
def test_episodes_that_are_missing_are_noticed(saved: bool, team: Roster, tmp_path: Path) -> None:
    alice = played(team, tmp_path, 1)
    if saved:
        alice.state.save()
    (tmp_path / "episodes-0.bin").unlink()
    with pytest.raises(
        PevdnError, match=r"the episodes of block 0 are missing in .*, and no peer has"
    ):
        party(team, tmp_path)


def test_episodes_are_kept_as_long_as_a_step_since_the_snapshot_may_need_them(
    team: Roster, tmp_path: Path
) -> None:
    alice = played(team, tmp_path, 3)  # the buffer holds two blocks
    assert alice.state.journal.read_block(0) is not None
    alice.state.save()
    assert (
        alice.state.journal.read_block(0) is None and alice.state.journal.read_block(1) is not None
    )
    assert party(team, tmp_path).state.replay.rows == alice.state.replay.rows


def test_the_folder_of_another_team_is_refused(
    team: Roster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("other") / "keys"
    other = keys.create(out, team.config, PLACES, "127.0.0.1:7703")
    party(team, tmp_path)
    with pytest.raises(UsageError, match="belongs to another team or to other settings"):
        party(other, tmp_path)


@pytest.fixture(scope="module")
def private_team(team: Roster, tmp_path_factory: pytest.TempPathFactory) -> Roster:
    settings = {
        "buffer_size": 8,
        "expected_batch_size": 2,
        "parallel_episodes": 2,
        "update_every": 2,
        "hidden_size": 4,
    }
    config = configuration.make("pe-vdn-c", "toy:two-step", 1000, 1, 0, settings)
    out = tmp_path_factory.mktemp("private") / "keys"
    return keys.create(out, config, PLACES, "127.0.0.1:7703")


def test_a_spent_ledger_without_snapshots_is_never_begun_anew(
    private_team: Roster, tmp_path: Path
) -> None:
    alice = party(private_team, tmp_path)
    assert alice.state.ledger is not None
    alice.state.ledger.reserve(1, 1, [99], 1)
    for snapshot in tmp_path.glob("snapshot-*.bin"):
        snapshot.unlink()
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(PevdnError, match=r"no snapshot-\*\.bin, but its ledger counts updates"):
        party(private_team, tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_a_party_killed_while_it_began_begins_anew(private_team: Roster, tmp_path: Path) -> None:
    party(private_team, tmp_path)
    for snapshot in tmp_path.glob("snapshot-*.bin"):
        snapshot.unlink()
    alice = party(private_team, tmp_path)  # nothing but the first line is in the ledger
    assert alice.state.ledger is not None and len(alice.state.ledger.lines) == 1


def test_a_snapshot_has_the_position_of_its_state(private_team: Roster, tmp_path: Path) -> None:
    """Lines that follow the last settlement are not part of it."""
    alice = party(private_team, tmp_path)
    ledger = alice.state.ledger
    assert ledger is not None
    ledger.settle(ledger.reserve(1, 1, [99], 1), [1], [1], "d")
    position = ledger.position
    ledger.reserve(2, 1, [99], 1)
    alice.state.save()
    found = Journal(tmp_path).snapshot()
    assert found is not None and tuple(found[1]["ledger"]) == position == (3, position[1])


def test_metrics_go_on_behind_the_last_whole_line(team: Roster, tmp_path: Path) -> None:
    alice = party(team, tmp_path)
    alice.state._score(Score(0.25, 1.0, 2.0))
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"seed": 0, "env_st')
    alice.state._score(Score(0.5, 2.0, 2.0))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["win_rate"] for line in lines] == [0.25, 0.5]
