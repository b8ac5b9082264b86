"""Record episodes of worlds that are stepped from NumPy.

Used wherever the host steps a world: by the simulation of external worlds and by a party.

Shapes: M episodes, n of them at a time, N agents, T steps, O and A the sizes of all agents'
observations and actions together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pevdn.worlds.interface import AgentSpec


class EpisodeRecorder:
    """M episodes, each at its own step; entries beyond the end of an episode are zero.

    `which` (n,) are episodes, `rows` (n,) their rows as `workers.row_type` has them. Without
    `recording` it keeps what is needed to act and to score, but no step.
    """

    def __init__(self, agents: Sequence[AgentSpec], M: int, T: int, recording: bool = True) -> None:
        N, steps = len(agents), T if recording else 0
        O, A = sum(a.observation_size for a in agents), sum(a.n_actions for a in agents)
        self.recording = recording
        self.t = np.zeros(M, np.int32)  # steps made
        self.total = np.zeros(M, np.float32)  # reward
        self.won = np.zeros(M, bool)
        self.seen = np.zeros((M, O), np.float32)  # the latest observations
        self.open = np.zeros((M, A), bool)  # the actions available now
        self.observations = np.zeros((M, steps + 1, O), np.float32)
        self.available = np.zeros((M, steps + 1, A), bool)
        self.actions = np.zeros((M, steps, N), np.int16)
        self.rewards = np.zeros((M, steps), np.float32)
        self.terminal = np.zeros((M, steps), bool)

    def step(self, which: np.ndarray, rows: np.ndarray) -> None:
        """Add actions, reward and end of a step; `look` must follow."""
        t = self.t[which]
        if self.recording:
            self.actions[which, t] = rows["actions"]
            self.rewards[which, t] = rows["reward"]
            self.terminal[which, t] = rows["done"] & ~rows["truncated"]
        self.t[which] += 1
        self.total[which] += rows["reward"]
        self.won[which] |= rows["done"] & rows["won"]

    def look(self, which: np.ndarray, rows: np.ndarray) -> None:
        """Add the observations and available actions after a reset or a step."""
        self.seen[which], self.open[which] = rows["observations"], rows["available"]
        if self.recording:
            self.observations[which, self.t[which]] = rows["observations"]
            self.available[which, self.t[which]] = rows["available"]
