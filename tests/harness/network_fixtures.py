"""Fixtures of the network tests (imported by tests/network/conftest.py)."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from network_keys import PARTIES, WORLD, two
from network_team import Heard, Three, listen, make_team, members_of, play

from pevdn import worlds
from pevdn.network import keys
from pevdn.network import party as parties
from pevdn.network.episodes import CompiledEpisodes
from pevdn.network.world_server import WorldServer
from pevdn.privacy.ledger import Ledger

AGENTS: dict[Any, Any] = {}
WORLDS: dict[Any, Any] = {}
VARIANTS = [
    *(("pe-vdn-b", "shares"), ("pe-vdn-b", "pairwise-masks")),
    *(("pe-vdn-c", "shares"), ("pe-vdn-d", "shares")),
]


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """Agents that are alike share their compiled program, in all tests: it keeps no state."""
    real_agent, real_world = parties.CompiledAgent, WorldServer.__init__

    def agent(config: Any, spec: Any, agents: int, steps: int) -> Any:
        s = dataclasses.replace(config.settings, eval_every=1, eval_episodes=1)
        key = dataclasses.replace(config, steps=1, seed=0, settings=s), spec, agents, steps
        if key not in AGENTS:
            AGENTS[key] = real_agent(config, spec, agents, steps)
        return AGENTS[key]

    def world(self: WorldServer, *args: Any, **options: Any) -> None:
        real_world(self, *args, **options)
        if isinstance(self.episodes, CompiledEpisodes):
            kept = WORLDS.setdefault(id(self.world), (self.world, self.episodes.programs))
            self.episodes.programs = kept[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parties, "CompiledAgent", agent)
        patch.setattr(WorldServer, "__init__", world)
        yield


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """toy:coordination has three agents."""
    world, real = Three(), worlds.make
    monkeypatch.setattr(worlds, "team_size", lambda env: 3)
    monkeypatch.setattr(worlds, "make", lambda env: world if "coord" in env else real(env))


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def heard(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    shared_programs: None,
) -> Heard:
    """A training to its end that was listened to."""
    team = make_team(tmp_path_factory.mktemp("heard") / "team", *request.param)
    members = members_of(team)
    listened = listen(members, team)
    assert play(members) == {}
    return listened


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of a team of two and a world."""
    out = tmp_path_factory.mktemp("team") / "keys"
    keys.create(out, two(), PARTIES, WORLD)
    return out


@pytest.fixture
def team(pristine: Path, tmp_path: Path) -> Path:
    """A copy of these keys, to be spoilt."""
    out = tmp_path / "keys"
    out.mkdir()
    for file in pristine.iterdir():
        target = out / file.name
        target.write_bytes(file.read_bytes())
        target.chmod(stat.S_IMODE(file.stat().st_mode))
    return out


@pytest.fixture
def one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parties with equal secrets draw equal numbers, also after a restart."""
    monkeypatch.setattr(Ledger, "salt", lambda ledger, step: "one")
