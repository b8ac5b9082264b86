"""The toy worlds outside of JAX, and worlds that fail: for worker processes, so without JAX."""

from __future__ import annotations

import numpy as np

from pevdn.worlds.base import AgentSpec, HostedWorld, Step

PAYOFFS = (((7, 7), (7, 7)), ((0, 1), (1, 8)))


class TwoStep:
    """As `pevdn.worlds.toy.TwoStep`."""

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


class Coordination:
    """As `pevdn.worlds.toy.Coordination` with two agents; cues as `cues_of` gives them."""

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
        views = tuple(
            np.concatenate([np.eye(k)[cue] * (self.t == 0), clock])
            for cue, k in zip(self.cues, self.cue_counts, strict=True)
        )
        return Step(views, self._masks(), reward, done, False, done and self.earned >= 2)

    def _masks(self) -> tuple[np.ndarray, ...]:
        wait, name = self.t != 2, self.t in (0, 2)
        return tuple(np.array([wait] + [name] * k) for k in self.cue_counts)


def cues_of(seed: int) -> tuple[int, int]:
    return seed % 2, seed // 2 % 3


TWO_STEP = HostedWorld("tiny:two-step", (AgentSpec(3, 2), AgentSpec(3, 2)), 2, TwoStep)
COORDINATION = HostedWorld("tiny:coordination", (AgentSpec(5, 3), AgentSpec(6, 4)), 3, Coordination)
