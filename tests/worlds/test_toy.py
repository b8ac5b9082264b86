"""The toy games: their optima, their rules, and their randomness."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pevdn.errors import UsageError
from pevdn.worlds.base import Step
from pevdn.worlds.toy import Coordination, TwoStep


@functools.cache
def coordination(n_agents: int) -> tuple[Coordination, Any, Any]:
    """The world, its `reset`, and `recall(cues, answers)`: wait, wait, answer → return, won."""
    world = Coordination(n_agents)

    def recall(cues: jax.Array, answers: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.key(0)
        state = world.reset(key)[0]._replace(cues=cues)
        total = jnp.zeros(())
        for actions in (jnp.zeros_like(answers), jnp.zeros_like(answers), answers):
            state, step = world.step(key, state, tuple(actions))
            total += step.reward
        return total, step.won & step.done & ~step.truncated

    return world, jax.jit(world.reset), jax.jit(recall)


@settings(max_examples=20)
@given(n_agents=st.sampled_from([1, 2, 5]), seed=st.integers(0, 2**31 - 1))
def test_coordination_with_memory_reaches_the_optimum(n_agents: int, seed: int) -> None:
    world, reset, recall = coordination(n_agents)
    state, step = reset(jax.random.key(seed))
    assert not step.done
    views = zip(step.observations, world.cue_counts, strict=True)
    seen = np.array([np.argmax(view[:k]) for view, k in views], np.int32)
    total, won = recall(state.cues, seen + 1)
    assert total == world.optimum == n_agents and won
    assert world.best_memoryless < world.optimum


def test_coordination_without_memory_gets_at_most_the_stated_value() -> None:
    world, _, recall = coordination(2)
    cues = np.array(list(itertools.product(*map(range, world.cue_counts))), np.int32)
    means = [np.mean([recall(cue, answer + 1)[0] for cue in cues]) for answer in cues]
    assert max(means) == pytest.approx(world.best_memoryless) == pytest.approx(1 / 2 + 1 / 3)


def test_coordination_shows_a_cue_once_and_to_its_owner_alone() -> None:
    world = Coordination(3)

    @jax.jit
    def views(cues: jax.Array) -> list[tuple[jax.Array, ...]]:
        key = jax.random.key(0)
        state = world.reset(key)[0]._replace(cues=cues)
        seen = [world._result(state, jnp.zeros(())).observations]
        for _ in range(world.max_steps):
            state, step = world.step(key, state, (jnp.int32(0),) * 3)
            seen.append(step.observations)
        return seen

    one, two = views(np.array([0, 0, 0], np.int32)), views(np.array([1, 0, 0], np.int32))
    for t in range(world.max_steps + 1):
        differs = [bool((a != b).any()) for a, b in zip(one[t], two[t], strict=True)]
        assert differs == [t == 0, False, False]


def test_coordination_agents_are_unlike_and_their_masks_matter() -> None:
    world = Coordination()
    assert world.agents[0] != world.agents[1]
    step = jax.jit(functools.partial(world.step, jax.random.key(0)))
    name, wait = (np.int32(1),) * 2, (np.int32(0),) * 2
    start, shown = jax.jit(world.reset)(jax.random.key(0))
    assert all(mask.all() for mask in shown.available)

    blank, seen = step(start, name)
    assert seen.reward == 0  # naming the cue at once pays nothing
    assert masks(seen) == [[True, False, False], [True, False, False, False]]
    assert step(blank, name)[1].reward == -2

    asked, seen = step(blank, wait)
    assert masks(seen) == [[False, True, True], [False, True, True, True]]
    _, seen = step(asked, wait)
    assert seen.reward == -2 and seen.done and not seen.won
    assert all(mask.any() for mask in seen.available)


def masks(step: Step) -> list[list[bool]]:
    return [mask.tolist() for mask in step.available]


def test_coordination_draws_every_cue_equally_often() -> None:
    world = Coordination()
    cues = jax.jit(jax.vmap(lambda k: world.reset(k)[0].cues))(
        jax.random.split(jax.random.key(0), 3000)
    )
    for i, k in enumerate(world.cue_counts):
        shares = np.bincount(np.asarray(cues[:, i]), minlength=k) / 3000
        assert len(shares) == k and (np.abs(shares - 1 / k) < 0.04).all()


def test_coordination_refuses_an_empty_team() -> None:
    with pytest.raises(UsageError, match="at least 1 agent, not 0"):
        Coordination(0)


two_step = jax.jit(functools.partial(TwoStep().step, None))


def two_step_return(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, bool]:
    state, step = TwoStep().reset(jax.random.key(0))
    total = 0.0
    for actions in (first, second):
        assert not step.done
        state, step = two_step(state, tuple(map(np.int32, actions)))
        total += float(step.reward)
    assert step.done
    return total, bool(step.won)


def test_two_step_pays_qmixs_matrices() -> None:
    pairs = list(itertools.product((0, 1), repeat=2))
    for first, second in itertools.product(pairs, pairs):
        expected = [[0, 1], [1, 8]][second[0]][second[1]] if first[0] else 7
        assert two_step_return(first, second) == (expected, expected == 8)
    assert TwoStep().optimum == 8 and TwoStep().additive_optimum == 7


def test_two_step_shows_both_agents_which_game_they_are_in() -> None:
    world = TwoStep()
    state, step = world.reset(jax.random.key(0))
    assert [o.tolist() for o in step.observations] == [[1, 0, 0]] * 2
    for first, seen in ((0, [0, 1, 0]), (1, [0, 0, 1])):
        _, step = two_step(state, (np.int32(first), np.int32(0)))
        assert [o.tolist() for o in step.observations] == [seen] * 2


def test_the_best_additive_value_of_two_step_settles_for_seven() -> None:
    """Least squares of Q_0(s, a_0) + Q_1(s, a_1) under uniform play, backwards from the end."""
    pairs = list(itertools.product((0, 1), repeat=2))
    design = np.array([[a == 0, a == 1, b == 0, b == 1] for a, b in pairs], float)

    def additive_fit(targets: list[float]) -> np.ndarray:
        return design @ np.linalg.lstsq(design, np.array(targets), rcond=None)[0]

    games = [
        additive_fit([two_step_return((first, 0), second)[0] for second in pairs])
        for first in (0, 1)
    ]
    np.testing.assert_allclose(games[1], [-1.5, 2.5, 2.5, 6.5], atol=1e-9)
    opening = additive_fit([games[first].max() for first, _ in pairs])
    first = pairs[int(opening.argmax())]
    second = pairs[int(games[first[0]].argmax())]
    assert two_step_return(first, second)[0] == TwoStep().additive_optimum
