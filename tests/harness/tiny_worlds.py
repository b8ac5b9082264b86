"""The toy worlds as external worlds, and worlds that fail. Worker processes import it: no JAX."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from pevdn.worlds.base import AgentSpec, ExternalWorld, Step

PAYOFFS = (((7, 7), (7, 7)), ((0, 1), (1, 8)))


class TwoStep:
    """The game of `pevdn.worlds.toy.TwoStep`."""

    def reset(self, seed: int) -> Step:
        self.game: int | None = None
        return self._seen(0, 0.0, False)

    def step(self, actions: tuple[int, ...]) -> Step:
        first, second = actions
        if self.game is None:
            self.game = first
            return self._seen(1 + first, 0.0, False)
        return self._seen(3, float(PAYOFFS[self.game][first][second]), True)

    def close(self) -> None: ...

    def _seen(self, state: int, reward: float, done: bool) -> Step:
        where, anything = np.eye(4)[state, :3], np.ones(2, bool)
        return Step((where, where), (anything, anything), reward, done, False, done and reward >= 8)


class TwoStepParallel:
    """The two-step game as a PettingZoo parallel environment; only the first agent gets rewards."""

    metadata: ClassVar[dict[str, Any]] = {"name": "two_step"}
    possible_agents: ClassVar[list[str]] = ["first", "second"]
    max_cycles = 2

    def __init__(self, fails: bool = False) -> None:
        self.game: Any = Failing(raises) if fails else TwoStep()

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0.0, 1.0, (3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return self._each(self.game.reset(0).observations), self._each([{}, {}])

    def step(self, actions: dict[str, int]) -> Any:
        after = self.game.step(tuple(actions[name] for name in self.possible_agents))
        self.agents = [] if after.done else self.agents
        return (
            self._each(after.observations),
            self._each([after.reward, 0.0]),
            self._each([after.done] * 2),
            self._each([False] * 2),
            self._each([{"won": after.won}] * 2),
        )

    def close(self) -> None: ...

    def _each(self, values: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))


parallel_env = TwoStepParallel  # makes this module a world: pettingzoo:tiny_worlds


class TwoStepBattle:
    """The two-step game with the interface of SMAC's `StarCraft2Env`."""

    def __init__(self) -> None:
        self.game = TwoStep()

    def get_env_info(self) -> dict[str, int]:
        return {"obs_shape": 3, "n_actions": 2, "n_agents": 2, "episode_limit": 2}

    def reset(self) -> Any:
        self.now = self.game.reset(0)
        return self.get_obs(), None

    def step(self, actions: Any) -> Any:
        self.now = self.game.step(tuple(actions))
        return self.now.reward, self.now.done, {"battle_won": self.now.won}

    def get_obs(self) -> list[Any]:
        return list(self.now.observations)

    def get_avail_agent_actions(self, agent: int) -> list[int]:
        return [1, 1]

    def close(self) -> None: ...


class Coordination:
    """The game of `pevdn.worlds.toy.Coordination` for two agents, with the cues of `cues_of`."""

    cue_counts = (2, 3)

    def reset(self, seed: int) -> Step:
        self.cues, self.t, self.earned = cues_of(seed), 0, 0.0
        return self._seen(0.0)

    def step(self, actions: tuple[int, ...]) -> Step:
        masks, reward = self._masks(), 0.0
        for cue, mask, action in zip(self.cues, masks, actions, strict=True):
            right = self.t == 2 and action == cue + 1
            reward += float(right) if mask[action] else -1.0
        self.t, self.earned = self.t + 1, self.earned + reward
        return self._seen(reward)

    def close(self) -> None: ...

    def _seen(self, reward: float) -> Step:
        clock, done = np.eye(4)[self.t, :3], self.t == 3
        observations = tuple(
            np.concatenate([np.eye(k)[cue] * (self.t == 0), clock])
            for cue, k in zip(self.cues, self.cue_counts, strict=True)
        )
        return Step(observations, self._masks(), reward, done, False, done and self.earned >= 2)

    def _masks(self) -> tuple[np.ndarray, ...]:
        wait, name = self.t != 2, self.t in (0, 2)
        return tuple(np.array([wait] + [name] * k) for k in self.cue_counts)


def cues_of(seed: Any) -> tuple[Any, Any]:
    return seed % 2, seed // 2 % 3


TWO_STEP = ExternalWorld("tiny:two-step", (AgentSpec(3, 2), AgentSpec(3, 2)), 2, TwoStep)
COORDINATION = ExternalWorld(
    "tiny:coordination", (AgentSpec(5, 3), AgentSpec(6, 4)), 3, Coordination
)


@dataclass
class Failing:
    """The two-step game; `how` happens at the `after`-th step of an environment."""

    how: Callable[[Step], Any]
    after: int = 2
    made: int = 0

    def __post_init__(self) -> None:
        self.game = TwoStep()

    def reset(self, seed: int) -> Step:
        return self.game.reset(seed)

    def step(self, actions: tuple[int, ...]) -> Step:
        self.made += 1
        step = self.game.step(actions)
        return self.how(step) if self.made == self.after else step  # type: ignore[no-any-return]

    def close(self) -> None: ...


def failing(
    how: Callable[[Step], Any], after: int = 2, max_workers: int | None = None
) -> ExternalWorld:
    """Return `TWO_STEP` with environments that fail."""
    build = functools.partial(Failing, how, after)
    return dataclasses.replace(TWO_STEP, build=build, max_workers=max_workers)


def raises(step: Step) -> Step:
    raise ValueError("the dice\nare lost")


def hangs(step: Step) -> Step:
    time.sleep(600)
    return step


def dies(step: Step) -> Step:
    os.kill(os.getpid(), signal.SIGKILL)
    return step


def leaves(step: Step) -> Step:
    os._exit(3)


def pays_nan(step: Step) -> Step:
    return step._replace(reward=np.nan)


def sees_infinity(step: Step) -> Step:
    return step._replace(observations=(step.observations[0], np.array([0.0, 1e39, 0.0])))


def grows(step: Step) -> Step:
    return step._replace(observations=(np.zeros(4), step.observations[1]))


def offers_nothing(step: Step) -> Step:
    return step._replace(available=(np.zeros(2, bool),) * 2, done=False)


def interrupts(step: Step) -> Step:
    os.kill(os.getpid(), signal.SIGINT)
    return step
