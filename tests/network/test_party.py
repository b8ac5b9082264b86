"""A team over real TLS learns what the simulation learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from network_team import (
    SETTINGS,
    SMALL,
    Heard,
    assert_near,
    assert_one_sentence,
    make_team,
    members_of,
    metrics_of,
    params_of,
    party_of,
    play,
    play_all,
)

import pevdn
from pevdn import worlds
from pevdn.config import experiment as configuration
from pevdn.errors import UsageError
from pevdn.network import local
from pevdn.privacy.accounting import Spent
from pevdn.simulation.program import Simulation

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_after_a_hundred_steps_every_party_is_where_the_simulation_is_exactly(
    heard: Heard,
) -> None:
    config = heard.team.config
    simulation = Simulation(worlds.make(config.env), config)
    state = jax.jit(simulation.start)(jnp.array([config.seed]))
    advance = jax.jit(simulation.advance)
    counts = [(0, 0, 0)]
    for until in (100, 160):
        state = advance(state, jnp.int32(until), jnp.int32(10**6))
        counts.append((int(state.env_steps[0]), int(state.episodes[0]), int(state.updates[0])))
    assert_near(simulation, state, list(heard.members.values()))
    for member in heard.members.values():
        assert member.state.progress.step >= (80 if config.noised else 100)
        found = [(x["env_steps"], x["episodes"], x["updates"]) for x in metrics_of(member.folder)]
        assert found == counts


def test_every_update_of_an_undisturbed_party_is_booked_before_and_after(heard: Heard) -> None:
    for member in heard.members.values():
        ledger, progress = member.state.ledger, member.state.progress
        if not heard.team.config.private:
            assert ledger is None
            continue
        assert ledger is not None and progress.updates > 10
        kinds = [line["kind"] for line in ledger.lines]
        openings = kinds.count("opening")
        assert openings == (progress.blocks if heard.team.config.noised else 0)
        updates = [kind for kind in kinds if kind != "opening"]
        assert updates == ["open", *["reserve", "settle"] * progress.updates]
        assert ledger.counted == [progress.updates] and ledger.lost == [0]
        assert ledger.exposure == [progress.exposure]


def test_an_external_world_can_be_served(tmp_path: Path) -> None:
    """The two-step game of PettingZoo's kind: bit for bit the training in JAX's."""
    changes = {"parallel_episodes": 3, "eval_episodes": 5}
    there = make_team(tmp_path / "there", env="pettingzoo:tiny_worlds", steps=60, **changes)
    here = make_team(tmp_path / "here", steps=60, **changes)
    played = [members_of(team) for team in (there, here)]
    assert play_all(played, 120) == [{}, {}]
    for name in ("alice", "bob"):
        mine, theirs = played[0][name], played[1][name]
        assert mine.state.progress.updates > 10
        assert metrics_of(mine.folder) == metrics_of(theirs.folder)
        for a, b in zip(params_of(mine), params_of(theirs), strict=True):
            assert np.array_equal(a, b)


def test_an_external_world_that_fails_stops_the_team_with_a_sentence(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", env="pettingzoo:tiny_worlds?fails=true", steps=60)
    said = play(members_of(team))
    assert set(said) == {"alice", "bob", "world"}
    for text in said.values():
        assert "raised ValueError: the dice are lost, at step 2 (reset with " in text
        assert_one_sentence(text)


def test_what_a_party_has_learnt_acts_by_itself(heard: Heard) -> None:
    """Loaded from the party's own data: the same parameters as its own, and an error that helps."""
    alice = heard.members["alice"]
    agent = pevdn.load_agent(alice.folder, "running")
    for mine, kept in zip(params_of(alice), jax.tree.leaves(agent.params), strict=True):
        assert np.array_equal(mine, kept)
    available = np.zeros(agent.n_actions, bool)
    available[1] = True
    assert agent.act(np.zeros(agent.observation_size), available) == 1
    with pytest.raises(UsageError, match="was trained without an anchor; use model 'running'"):
        pevdn.load_agent(alice.folder, "anchor")
    with pytest.raises(UsageError, match="holds no data of a party"):
        pevdn.load_agent(heard.team.path.parent)


def test_the_data_of_a_party_are_closed_and_have_a_readme(heard: Heard) -> None:
    """It says of every file what it is; that a rehearsal hides nothing, too."""
    for member in heard.members.values():
        assert member.folder.stat().st_mode & 0o777 == 0o700
        page = (member.folder / "README.md").read_text()
        for file in member.folder.iterdir():
            name = re.sub(r"\d+", "*", file.name)
            assert name in (".lock", "README.md") or f"`{name}`" in page, name
        assert ("with differential privacy" in page) == heard.team.config.private
        assert "This is a rehearsal" in page and str(member.folder) not in page


def test_a_party_writes_the_metrics_of_a_run(heard: Heard) -> None:
    wanted = ["seed", "env_steps", "episodes", "updates", "win_rate", "return", "episode_length"]
    if heard.team.config.private:
        noised = heard.team.config.noised
        wanted += [name for name in Spent._fields if noised or name != "epsilon_record"]
    written = [metrics_of(member.folder) for member in heard.members.values()]
    assert all(list(line) == wanted for line in written[0])
    assert all(lines == written[0] for lines in written)


# --- the sum ---------------------------------------------------------------------------------


def test_every_opened_sum_is_the_integer_sum_of_the_encoded_messages(heard: Heard) -> None:
    p, progress = heard.team.config.settings.modulus, heard.members["alice"].state.progress
    sums = progress.blocks if heard.team.config.noised else progress.updates
    assert len(heard.words) == sums
    assert len(heard.words) >= 40
    for step, words in heard.words.items():
        assert set(words) == set(heard.members)
        total = sum(w.astype(object) for w in words.values()) % p
        for opened in heard.opened[step].values():
            assert np.array_equal(opened.astype(object), total)


@pytest.mark.slow
def test_four_processes_learn_3m_as_the_simulation_does(tmp_path: Path) -> None:
    settings = {**SMALL, "hidden_size": 16, "eval_every": 10_000, "parallel_episodes": 4}
    config = configuration.make("pe-vdn-b", "smax-sc2:3m", 5000, 1, 0, settings)
    team = local.make(tmp_path / "team", config, "shares", 300.0, True)
    reports = local.up(team, lambda _: None)
    assert {report["state"] for report in reports.values()} == {"finished"}
    simulation = Simulation(worlds.make(config.env), config)
    state = jax.jit(simulation.start)(jnp.array([0]))
    state = jax.jit(simulation.advance)(state, jnp.int32(5000), jnp.int32(10**6))
    members = [party_of(team, party.name) for party in team.parties]
    assert members[0].state.progress.step >= 200
    assert members[0].state.progress.updates == int(state.updates[0])
    assert_near(simulation, state, members)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["iql", "pe-vdn-a", "pe-vdn-b", "pe-vdn-c"])
def test_a_team_writes_the_metrics_that_a_simulated_run_writes(
    algorithm: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"average_decay": 0.9}
    if algorithm == "pe-vdn-c":
        changes |= {"anchor": True, "anchor_threshold": 0.3}
    team = make_team(tmp_path / "team", algorithm, steps=300, **changes)
    members = members_of(team)
    assert play(members) == {}
    settings = {**SETTINGS[algorithm], **changes}
    run = pevdn.train(
        algorithm, "toy:two-step", steps=300, out=tmp_path / "run", seed=0, **settings
    )
    found, wanted = metrics_of(members["alice"].folder), run.metrics
    assert [list(line) for line in found] == [list(line) for line in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        empty = [name for name, value in theirs.items() if value is None]
        assert all(mine.pop(name) is theirs.pop(name) is None for name in empty)
        assert mine == pytest.approx(theirs, rel=1e-4)
