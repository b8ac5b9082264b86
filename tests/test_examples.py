"""The examples run unchanged, and their bodies follow the protocol."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pevdn.config import experiment as config
from pevdn.errors import UsageError
from pevdn.network import keys
from pevdn.network.environment import ACTIVE, ENDED, Observation
from pevdn.network.party import Party
from pevdn.network.roster import Roster

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ONE = {"parallel_episodes": 1, "update_every": 1, "eval_episodes": 1}


@pytest.fixture
def own_body(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import own_body

    return own_body


def test_two_bodies_report_the_same_episodes(own_body: ModuleType) -> None:
    heights, together = [0, 0], threading.Barrier(2, timeout=10)
    results: list[list[Observation]] = [[], []]

    def play(end: int) -> None:
        body = own_body.Carrier(end, heights, together)
        for _ in range(3):
            results[end].append(body.observe())
            for step in range(body.max_steps):
                body.act(step % 3)
                results[end].append(body.observe())

    threads = [threading.Thread(target=play, args=(end,)) for end in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results[0]) == len(results[1]) == 3 * (own_body.STEPS + 1)
    for number, (mine, theirs) in enumerate(zip(*results, strict=True)):
        assert mine.rewards == theirs.rewards and mine.flags == theirs.flags
        last = number % (own_body.STEPS + 1) == own_body.STEPS
        assert bool(mine.flags[0] & ENDED) == mine.over == last and mine.flags[0] & ACTIVE
        assert mine.observations.shape == (1, own_body.HEIGHTS) and np.sum(mine.observations) == 1


@pytest.mark.slow
def test_two_parties_with_bodies_train_without_a_world(tmp_path: Path) -> None:
    team = tmp_path / "team"
    subprocess.run(
        [sys.executable, EXAMPLES / "own_body.py", team, "40"],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    journals = []
    for name in ("alice", "bob"):
        report = json.loads((team / f"{name}.data" / "status.json").read_text())
        assert report["state"] == "finished" and report["updates"] > 0
        lines = (team / f"{name}.data" / "journal-0.jsonl").read_text().splitlines()
        journals.append([json.loads(line) for line in lines])
    assert journals[0] == journals[1]


@pytest.mark.parametrize("setting", ONE)
def test_a_body_does_not_play_several_episodes_side_by_side(
    own_body: ModuleType, tmp_path: Path, setting: str
) -> None:
    team = _team(tmp_path, {**ONE, setting: 2})
    with pytest.raises(UsageError, match=f"{setting} is 2, .* one episode at a time"):
        _alice(team, own_body.Carrier(0, [0, 0], None))


def test_without_a_world_a_party_needs_a_body(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no \\[world\\], so alice needs its own body"):
        _alice(_team(tmp_path, ONE))


def _team(out: Path, settings: dict[str, int]) -> Roster:
    wanted = config.make("pe-vdn-b", "toy:two-step", 10, settings=settings)
    return keys.create(out, wanted, [("alice", "127.0.0.1:7701"), ("bob", "127.0.0.1:7702")])


def _alice(team: Roster, body: object = None) -> None:
    key = (team.path.parent / "alice.key").read_bytes()

    async def make() -> None:
        Party(team, "alice", key, team.path.parent / "alice.data", body)  # type: ignore[arg-type]

    asyncio.run(make())
