"""Membership inference: it succeeds without noise, and within the bound of ε with it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from attacked import generator, memorable

from pevdn import worlds
from pevdn.config.experiment import make
from pevdn.privacy import accounting, planner
from pevdn.verification.attacks import membership
from pevdn.verification.attacks.statistics import largest_auc

CONFIG = make(
    "pe-vdn-b",
    "toy:coordination",
    settings={"hidden_size": 16, "learning_rate": 0.01, "delta": 1e-3, "gamma": 0.5},
)
UPDATES = 60
Inferences = dict[tuple[float | None, str], membership.Inference]


def infer(teams: int, *epsilons: float) -> Inferences:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "EPSILONS", epsilons)
        found = membership.attack(
            worlds.make(CONFIG.env),
            CONFIG,
            memorable(32),
            membership.toss(teams, 32, seed=0),
            UPDATES,
            seed=0,
            note=lambda text: None,
        )
    goals = [goal for goal in (None, *epsilons) for _ in range(2)]
    return {(goal, x.observer): x for goal, x in zip(goals, found, strict=True)}


@pytest.fixture(scope="module")
def inferences() -> Inferences:
    return infer(12, 1.0)


@pytest.mark.parametrize("observer", ["agent", "team"])
def test_without_noise_membership_shows(inferences: Inferences, observer: str) -> None:
    found = inferences[None, observer]
    assert found.algorithm == "pe-vdn-b"
    assert found.estimate.low > 0.7 and found.largest_auc == 1.0


def test_the_whole_team_betrays_more_than_one_agent(inferences: Inferences) -> None:
    assert inferences[None, "team"].estimate.low > inferences[None, "agent"].estimate.high


@pytest.mark.parametrize("observer", ["agent", "team"])
def test_at_epsilon_1_membership_shows_no_more_than_is_allowed(
    inferences: Inferences, observer: str
) -> None:
    found = inferences[1.0, observer]
    assert found.epsilon_agent is not None and 0.9 < found.epsilon_agent <= 1.0
    assert found.estimate.auc <= found.largest_auc < inferences[None, observer].estimate.low
    assert found.estimate.contains_chance


@pytest.mark.slow
def test_membership_shows_less_the_smaller_epsilon_is_and_never_more_than_is_allowed() -> None:
    found = infer(24, math.inf, 8.0, 1.0, 0.1)
    for observer in ("agent", "team"):
        clipped, large, _, small = (found[e, observer] for e in (math.inf, 8.0, 1.0, 0.1))
        assert clipped.estimate.low > 0.7  # clipping alone does not protect
        assert clipped.estimate.low > large.estimate.high > large.estimate.low > 0.5
        assert large.estimate.low > small.estimate.high
        assert small.estimate.contains_chance
    assert all(x.estimate.low <= x.largest_auc for x in found.values())


def test_epsilon_is_that_of_the_updates_made(inferences: Inferences) -> None:
    found = inferences[1.0, "team"]
    assert found.noise_multiplier is not None and found.epsilon_team is not None
    seen = found.noise_multiplier / math.sqrt(2)
    q = membership.BATCH / membership.CANDIDATES
    assert found.epsilon_team == accounting.epsilon(UPDATES, q, seen, 1e-3)
    assert found.largest_auc < largest_auc([(found.epsilon_team, 1e-3)])


OWN = {  # a recipe unlike the defaults
    "optimizer": "sgd",
    "learning_rate": 0.03,
    "clip_norm": 0.2,
    "hidden_size": 7,
    "gamma": 0.9,
    "double_q": False,
    "noise_multiplier": 1.2,
    "buffer_size": 512,
    "buffer_throughput": 2.0,
    "update_every": 4,
    "relation": "replace-one",
}
RECIPE = make("pe-vdn-c", "toy:coordination", steps=9_000, settings=OWN)


@pytest.mark.parametrize("private", [False, True])
def test_shadow_teams_are_trained_with_the_settings_of_the_run(private: bool) -> None:
    shadow = membership.shadow_config(RECIPE, private, 0.7, 32)
    own, used = dataclasses.asdict(RECIPE.settings), dataclasses.asdict(shadow.settings)
    assert shadow.algorithm == ("pe-vdn-c" if private else "pe-vdn-b")
    assert (shadow.steps, shadow.delta) == (RECIPE.steps, RECIPE.delta)
    replay = {"buffer_size", "expected_batch_size", "update_every", "parallel_episodes"}
    privacy = {"noise_multiplier", "delta", "relation", "anchor"}
    changed = {name for name in own if own[name] != used[name]}
    assert changed <= replay | privacy
    assert not changed & {"optimizer", "learning_rate", "clip_norm", "hidden_size", "gamma"}


def test_a_private_run_is_compared_with_its_own_noise_and_its_own_epsilon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = []

    def errors(world: Any, shadow: Any, episodes: Any, member: np.ndarray, *_: int) -> Any:
        trained.append(shadow.settings)
        random = generator(len(trained)).random((3, *member.shape))
        return membership.Errors(np.swapaxes(random[:2], 0, 1), random[2])

    monkeypatch.setattr(membership, "EPSILONS", (8.0,))
    monkeypatch.setattr(membership, "train", errors)
    said: list[str] = []
    asked = (memorable(32), membership.toss(4, 32, 0), UPDATES, 0, said.append)
    world = worlds.make(RECIPE.env)
    rows = membership.attack(world, RECIPE, *asked)[::2]
    assert [row.own for row in rows] == [None, None, "noise", "ε agent"]
    assert [s.noise_multiplier for s in trained[2:]] == [r.noise_multiplier for r in rows[2:]]
    assert rows[2].noise_multiplier == 1.2 and {s.clip_norm for s in trained} == {0.2}
    wanted = planner.Plan.of(RECIPE, 2).epsilon("agent")
    assert rows[3].epsilon_agent == pytest.approx(wanted, rel=0.01)
    assert "this run's noise" in said[2] and "(4/4)" in said[3]
    for other in (CONFIG, make("pe-vdn-c", RECIPE.env, settings={"noise_multiplier": 0})):
        assert [way.own for way in membership.trainings(other, 2, 10, 0.25)] == [None, None]


def test_noise_is_just_enough() -> None:
    assert membership.noise_for(math.inf, 10, 0.25, 1e-4) == 0.0
    for epsilon in (1.0, 30.0):
        noise = membership.noise_for(epsilon, 10, 0.25, 1e-4)
        assert accounting.epsilon(10, 0.25, noise, 1e-4) <= epsilon
        assert accounting.epsilon(10, 0.25, noise / 1.02, 1e-4) > epsilon


def test_a_team_never_learns_of_an_episode_that_it_was_not_given() -> None:
    episodes = memorable(8)
    changed = tuple(
        e._replace(rewards=e.rewards + 5 * (np.arange(8) == 3)[:, None]) for e in episodes
    )
    member = membership.toss(6, 8, seed=1)
    assert 0 < member[:, 3].sum() < 6
    world, config = worlds.make(CONFIG.env), membership.shadow_config(CONFIG, False, 0.0, 8)
    before, after = (
        np.delete(membership.train(world, config, given, member, 20, seed=0).agent, 3, axis=-1)
        for given in (episodes, changed)
    )
    assert np.array_equal((before == after).all((1, 2)), ~member[:, 3])


def test_guessing_has_an_auc_of_one_half() -> None:
    found = []
    for seed in range(200):
        errors, member = np.exp(generator(seed).normal(size=(6, 32))), membership.toss(6, 32, seed)
        found.append(membership.infer(errors[:, None], member))
    middle, deviation = np.mean([x.auc for x in found]), np.std([x.auc for x in found])
    assert abs(middle - 0.5) < 3 * deviation / math.sqrt(200)
    assert np.mean([x.contains_chance for x in found]) > 0.9
