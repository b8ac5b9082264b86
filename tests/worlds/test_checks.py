"""Claims about `pevdn check-env`: a sound world passes, and every fault is found and named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support import cli, finish, start

import pevdn
from pevdn import worlds
from pevdn.errors import UsageError
from pevdn.worlds.base import ExternalWorld, Step
from pevdn.worlds.checks import Check, Checked
from pevdn.worlds.interface import AgentSpec
from pevdn.worlds.toy import TwoStep

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CARRY = "pettingzoo:own_world?team-reward=common"


class Coin:
    """Two agents guess a coin that they see; `faults` are what goes wrong, by name."""

    seeded = reports_won = True

    def __init__(self, **faults: Any) -> None:
        self.faults = faults

    def reset(self, seed: int) -> Step:
        if "seed" in self.faults:  # reset uses another one
            seed = self.faults["seed"]()
        self.chance, self.steps = np.random.default_rng(seed), 0
        return self._seen(0.0)

    def step(self, actions: tuple[int, ...]) -> Step:
        self.steps += 1
        if self.steps == self.faults.get("raises"):
            raise ValueError("the coin rolled away")
        reward = self.faults.get("reward", float(np.mean([a == self.coin for a in actions])))
        return self._seen(reward)

    def _seen(self, reward: Any) -> Step:
        self.coin = int(self.chance.integers(2))
        end = self.faults.get("end", 4)
        seen = np.array([1.0, 0.0], np.float32)[[self.coin, 1 - self.coin]]
        masks = [np.ones(2, bool), np.ones(2, bool)]
        if self.steps == 2:
            seen = self.faults.get("seen", seen)
            masks[1] = self.faults.get("mask", masks[1])
        done = self.steps >= end
        truncated = self.faults.get("truncated", done)
        return Step((seen, seen), tuple(masks), reward, done, truncated, done and reward == 1)

    def close(self) -> None:
        self.faults["closed"] = True


def coin(**faults: Any) -> ExternalWorld:
    return ExternalWorld("coin", (AgentSpec(2, 2),) * 2, 4, lambda: Coin(**faults), max_workers=1)


def results(found: Checked) -> dict[str, str]:
    return {check.check: check.result for check in found.checks}


def named(found: Checked, name: str) -> Check:
    (check,) = [check for check in found.checks if check.check == name]
    return check


@pytest.mark.parametrize("env", ["toy:coordination", coin()], ids=["in JAX", "external"])
def test_a_sound_world_passes_every_check(env: Any) -> None:
    found = pevdn.check_env(env, episodes=3)
    assert found.ok and set(results(found).values()) == {"ok"}
    play = ["team", "steps", "observations", "masks", "repeatable", "chance"]
    assert list(results(found)) == [*play, "reward", "end", "leaving", "won", "speed"]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"raises": 3}, "it raised ValueError: the coin rolled away, in episode 0, step 3"),
        ({"seen": np.array([np.nan, 0])}, "observation whose entry 0 is nan, in episode 0, step 2"),
        ({"seen": np.zeros(3)}, "an observation of shape (3,), not of shape (2,)"),
        ({"mask": np.zeros(2, bool)}, "gave agent 1 no available action, in episode 0, step 2"),
        ({"mask": np.ones(5, bool)}, "available actions of shape (5,)"),
        ({"reward": np.inf}, "returned reward inf, in episode 0, step 1"),
        ({"reward": [1.0, 2.0]}, "not one number for the team"),
        ({"truncated": True}, "returned truncated=True without done"),
        ({"end": 0}, "reset returned an episode that is already done"),
        ({"end": 9, "truncated": False}, "not over after max_steps=4, in episode 0; end it with"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_world_that_cannot_be_trained_in_is_told_why(
    faults: dict[str, Any], message: str
) -> None:
    found = pevdn.check_env(coin(**faults))
    assert not found.ok
    assert named(found, "steps").result == "error"
    assert message in named(found, "steps").sentence


@pytest.mark.parametrize(
    ("faults", "check", "message"),
    [
        ({"seed": time.perf_counter_ns}, "repeatable", "gave two different episodes"),
        ({"seed": lambda: 5}, "chance", "reset does not use its seed"),
        ({"reward": 0.0}, "reward", "every reward was 0"),
        ({"seen": np.array([1e4, 0])}, "observations", "observations reach 10000; scale them"),
    ],
)
def test_what_is_odd_is_a_warning(faults: dict[str, Any], check: str, message: str) -> None:
    found = pevdn.check_env(coin(**faults))
    assert found.ok
    assert {name for name, result in results(found).items() if result == "warning"} == {check}
    assert message in named(found, check).sentence


def test_who_sees_the_same_in_every_step_is_named() -> None:
    class Blind(Coin):
        def _seen(self, reward: Any) -> Step:
            step = super()._seen(reward)
            return step._replace(observations=(step.observations[0], np.zeros(2)))

    world = ExternalWorld("blind", (AgentSpec(2, 2),) * 2, 4, Blind)
    check = named(pevdn.check_env(world), "observations")
    assert check.result == "warning"
    assert "agent 1 observed the same numbers in every step" in check.sentence


def test_a_world_in_jax_whose_types_change_would_not_compile() -> None:
    class Changing(TwoStep):
        def step(self, key: Any, state: Any, actions: Any) -> Any:
            state, step = super().step(key, state, actions)
            return state.astype(jnp.float32), step

    found = pevdn.check_env(Changing())
    assert results(found) == {"team": "ok", "types": "error"}
    assert "reset returns int32 () at [0], but step returns float32 ()" in found.checks[1].sentence


def test_a_world_in_jax_that_is_no_pure_function_does_not_compile() -> None:
    class Branching(TwoStep):
        def step(self, key: Any, state: Any, actions: Any) -> Any:
            return super().step(key, state, actions) if state == 0 else (state, None)

    check = pevdn.check_env(Branching()).checks[-1]
    assert check.result == "error"
    assert "it does not compile: TracerBoolConversionError" in check.sentence


def test_the_environment_is_closed_also_if_it_fails() -> None:
    faults: dict[str, Any] = {"raises": 1}
    made = Coin(**faults)
    pevdn.check_env(ExternalWorld("coin", (AgentSpec(2, 2),) * 2, 4, lambda: made, max_workers=1))
    assert made.faults["closed"]


def test_what_pettingzoo_pays_and_tells_is_explained() -> None:
    pytest.importorskip("mpe2")
    found = pevdn.check_env("pettingzoo:mpe2.simple_spread_v3?N=4")
    assert "the sum of the agents' rewards, which differed" in named(found, "reward").sentence
    assert "win_rate stays 0" in named(found, "won").sentence
    assert "5 of 5 were truncated" in named(found, "end").sentence
    alike = pevdn.check_env("pettingzoo:mpe2.simple_reference_v3?local_ratio=0", episodes=1)
    assert (
        "rewards, all equal; if they always are, team-reward=common"
        in named(alike, "reward").sentence
    )


@pytest.fixture
def in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pettingzoo")
    monkeypatch.chdir(EXAMPLES)


def test_the_example_of_an_own_world_is_sound(in_examples: None) -> None:
    said = cli("check-env", CARRY, "--episodes", 3, "--json")
    found = json.loads(said.out)
    assert said.code == 0 and found["ok"] and found["env"] == CARRY and found["max_steps"] == 20
    assert {check["result"] for check in found["checks"]} == {"ok"}
    assert [agent["observation_size"] for agent in found["agents"]] == [2, 2]


@pytest.mark.filterwarnings("ignore")
def test_the_example_of_an_own_world_is_pettingzoos_and_takes_a_team(in_examples: None) -> None:
    from pettingzoo.test import parallel_api_test

    adapter = worlds.make(CARRY).build()
    parallel_api_test(adapter.env, 100)

    def carried(walk: Any) -> int:
        won = 0
        for seed in range(40):
            step = adapter.reset(seed)
            while not step.done:
                step = adapter.step(tuple(walk(*seen) for seen in step.observations))
            won += bool(step.won)
        return won

    assert carried(lambda end, strain: 0 if strain < -0.2 else 2) == 40  # waits for the other
    assert carried(lambda end, strain: 2) < 30


def test_the_command_says_it_in_a_table_and_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pettingzoo")
    faulty = (
        (EXAMPLES / "own_world.py").read_text().replace("self.table.ends / ROOM", "[1e999] * 2")
    )
    (tmp_path / "faulty_world.py").write_text("import os; os.system('echo noise')\n" + faulty)
    monkeypatch.chdir(tmp_path)
    said = cli("check-env", "pettingzoo:faulty_world")
    assert said.code == 1
    assert said.out.startswith("pettingzoo:faulty_world: a team cannot train here")
    assert "whose entry 0 is inf" in " ".join(said.out.split())
    process = start("check-env", "pettingzoo:faulty_world", "--json", cwd=tmp_path)
    other = finish(process)  # what other programs print is kept apart, too
    assert other.code == 1 and not json.loads(other.out)["ok"] and "noise" in other.err


def test_wrong_words_are_one_sentence() -> None:
    assert "unknown world 'toy:two-steps'" in cli("check-env", "toy:two-steps").sentence
    said = cli("check-env", "toy:two-step", "--episodes", 0)
    assert said.code == 2 and "episodes is 0, but must be at least 1" in said.sentence
    with pytest.raises(UsageError, match="5 is not a world"):
        pevdn.check_env(5)
