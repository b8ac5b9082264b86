"""Claims about loaded policies: they act as they were evaluated."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    content,
    train,
)

import pevdn
from pevdn import worlds
from pevdn.errors import PevdnError, UsageError
from pevdn.policies import evaluate, policy
from pevdn.training import evaluator
from pevdn.training.loop import Run

pytestmark = pytest.mark.usefixtures("compiled_once")


# --- policies --------------------------------------------------------------------------------


def test_a_loaded_policy_plays_as_evaluation_does(finished: dict[str, Run]) -> None:
    world, team = worlds.make("toy:two-step"), pevdn.load(finished["pe-vdn-b"])
    state, step = world.reset(jax.random.key(0))
    total = 0.0
    while not step.done:
        actions = team.act(step.observations, step.available)
        state, step = world.step(jax.random.key(0), state, tuple(np.int32(a) for a in actions))
        total += float(step.reward)
    assert finished["pe-vdn-b"].metrics[-1]["return"] == total
    assert evaluate.evaluate(finished["pe-vdn-b"], episodes=8)[0]["return"] == total


def test_a_policy_with_memory_earns_what_evaluation_says(finished: dict[str, Run]) -> None:
    world, team = worlds.make("toy:coordination"), pevdn.load(finished["pe-vdn-c"])
    games = {}
    for number in range(60):
        state, step = world.reset(jax.random.key(number))
        cues, total = tuple(np.asarray(state.cues).tolist()), 0.0
        if cues in games:
            continue
        team.reset()
        while not step.done:
            actions = team.act(step.observations, step.available)
            state, step = world.step(jax.random.key(0), state, tuple(np.int32(a) for a in actions))
            total += float(step.reward)
        games[cues] = total
    assert len(games) == 6  # 2 cues for one agent, 3 for the other, all equally likely
    row = evaluate.evaluate(finished["pe-vdn-c"], episodes=2048)[0]
    assert row["return"] == pytest.approx(sum(games.values()) / 6, abs=0.1)


def test_a_policy_is_deterministic_and_reset_makes_it_forget(finished: dict[str, Run]) -> None:
    team = pevdn.load(finished["pe-vdn-c"])
    random = np.random.default_rng(0)
    seen = [[random.normal(size=agent.observation_size) for agent in team] for _ in range(4)]

    def play() -> list[Any]:
        return [
            (team.act(x), [np.asarray(agent.q_values).tolist() for agent in team]) for x in seen
        ]

    first = play()
    remembering = play()
    team.reset()
    assert play() == first != remembering


def test_what_an_agent_saw_before_matters_to_what_it_does_now(finished: dict[str, Run]) -> None:
    agent = pevdn.load(finished["pe-vdn-c"])[0]
    now = np.ones(agent.observation_size)
    values = []
    for before in (-1.0, 1.0):
        agent.reset()
        agent.act(np.full(agent.observation_size, before), [True, False, False])
        agent.act(now)
        values.append(np.asarray(agent.q_values))
    assert not np.allclose(values[0], values[1])


def test_an_agent_acts_alone_as_it_acts_in_its_team(finished: dict[str, Run]) -> None:
    team, alone = pevdn.load(finished["pe-vdn-c"]), pevdn.load(finished["pe-vdn-c"])
    random = np.random.default_rng(1)
    assert [agent.observation_size for agent in team] == [5, 6]  # unlike agents
    for _ in range(5):
        seen = [random.normal(size=agent.observation_size) for agent in team]
        assert team.act(seen) == [alone[i].act(x) for i, x in enumerate(seen)]


@given(st.data())
def test_only_available_actions_are_taken(finished: dict[str, Run], data: st.DataObject) -> None:
    agent = _loaded(finished["pe-vdn-c"])[1]
    mask = data.draw(st.lists(st.booleans(), min_size=4, max_size=4).filter(any))
    seen = data.draw(st.lists(st.floats(-10, 10), min_size=6, max_size=6))
    agent.reset()
    assert mask[agent.act(seen, mask)]


def test_a_policy_names_what_does_not_fit(finished: dict[str, Run]) -> None:
    team = pevdn.load(finished["pe-vdn-c"])
    good = [np.zeros(5), np.zeros(6)]
    with pytest.raises(UsageError, match=r"shape \(4,\) was given to an agent that takes \(5,\)"):
        team.act([np.zeros(4), np.zeros(6)])
    with pytest.raises(UsageError, match="1 observations were given to 2 agents"):
        team.act(good[:1])
    with pytest.raises(UsageError, match="available actions of 1 agents were given to 2"):
        team.act(good, [[True] * 3])
    with pytest.raises(UsageError, match="with at least one true"):
        team[0].act(good[0], [False] * 3)


def test_asking_for_a_model_that_is_not_there_says_what_is(
    finished: dict[str, Run], three: dict[str, Run], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="was trained without an anchor; use model 'running'"):
        pevdn.load(finished["pe-vdn-b"], model="anchor")
    with pytest.raises(UsageError, match="was trained without an average; use model 'running'"):
        pevdn.load(finished["pe-vdn-b"], model="average")
    with pytest.raises(UsageError, match="must be 'best', 'running', 'average' or 'anchor'"):
        pevdn.load(finished["pe-vdn-b"], model="newest")
    with pytest.raises(UsageError, match=r"seed is 8, but .* has seeds 5 to 7"):
        pevdn.load(three["pe-vdn-b"], seed=8)
    hopeless = train("pe-vdn-c", tmp_path / "run", steps=40, anchor_threshold=1.0)
    with pytest.raises(UsageError, match=r"not every seed of .* has reached an anchor"):
        pevdn.load(hopeless, model="anchor")
    assert hopeless.summary["anchored_seeds"] == 0


def test_the_best_model_is_the_anchor_once_there_is_one(finished: dict[str, Run]) -> None:
    assert finished["pe-vdn-c"].summary["anchored_seeds"] == 1
    best, anchor, running = (
        pevdn.load(finished["pe-vdn-c"], model=model)[0].params.output_weight
        for model in ("best", "anchor", "running")
    )
    assert np.array_equal(best, anchor)
    assert not np.array_equal(best, running)


def test_the_average_is_evaluated_kept_and_loaded_before_the_running_model(tmp_path: Path) -> None:
    settings = {"average_decay": 0.9, "anchor_penalty": 0.0, "anchor_threshold": 1.0}  # no anchor
    run = train("pe-vdn-c", tmp_path / "run", **settings)
    assert all(0 <= line["win_rate_average"] <= 1 for line in run.metrics)
    late = [x["win_rate_average"] for x in run.metrics if x["env_steps"] > 151]
    assert run.summary["late_win_rate_average"] == pytest.approx(sum(late) / len(late))
    best, average, running = (
        pevdn.load(run, model=model)[0].params.output_weight
        for model in ("best", "average", "running")
    )
    assert np.array_equal(best, average)
    assert not np.array_equal(best, running)


def test_where_an_average_is_kept_the_anchor_is_the_best_of_the_averages(tmp_path: Path) -> None:
    """The one that beat the threshold and was not beaten; and it is what is released."""
    common = {"average_decay": 0.9, "anchor_penalty": 0.0, "seed": 2}
    scout = train("pe-vdn-c", tmp_path / "scout", anchor_threshold=1.0, **common)
    best = max(scout.metrics[1:], key=lambda line: line["win_rate_average"])
    assert best["win_rate_average"] > scout.metrics[0]["win_rate_average"]
    common["anchor_threshold"] = best["win_rate_average"] - 0.01
    run = train("pe-vdn-c", tmp_path / "run", **common)
    first = next(line for line in run.metrics if line["win_rate_anchor"] is not None)
    assert first["env_steps"] == best["env_steps"] < run.metrics[-1]["env_steps"]
    short = train("pe-vdn-c", tmp_path / "short", steps=best["env_steps"], **common)

    def weights(run: Run, model: str) -> np.ndarray:
        return np.asarray(pevdn.load(run, model=model)[0].params.output_weight)

    assert np.array_equal(weights(run, "anchor"), weights(short, "average"))
    assert np.array_equal(weights(run, "best"), weights(run, "anchor"))
    assert not np.array_equal(weights(run, "best"), weights(run, "average"))


def test_no_two_scores_are_of_the_same_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above all: an anchor is not scored on the episodes for which it was chosen."""
    real, drawn = evaluator.evaluation_keys, []

    def draw(seeds: Any, number: int) -> Any:
        keys = real(seeds, number)
        drawn.append(tuple(jax.random.key_data(keys[0]).tolist()))
        return keys

    monkeypatch.setattr(evaluator, "evaluation_keys", draw)
    trained = train("pe-vdn-c", tmp_path / "run", average_decay=0.9, anchor_penalty=0.0)
    assert all("win_rate_anchor" in line and "win_rate_average" in line for line in trained.metrics)
    assert len(set(drawn)) == len(drawn) == 3 * len(trained.metrics)


def test_loading_a_run_changes_nothing_and_says_when_there_is_nothing(
    finished: dict[str, Run], tmp_path: Path
) -> None:
    path = finished["pe-vdn-b"].path
    before = content(path)
    pevdn.load(str(path))
    assert content(path) == before
    empty = tmp_path / "run"
    empty.mkdir()
    shutil.copy(path / "config.yaml", empty)
    with pytest.raises(PevdnError, match="holds no complete checkpoint"):
        pevdn.load(empty)
    assert [p.name for p in empty.iterdir()] == ["config.yaml"]


_kept: dict[Path, policy.Policy] = {}


def _loaded(of: Run) -> policy.Policy:
    if of.path not in _kept:
        _kept[of.path] = pevdn.load(of)
    return _kept[of.path]
