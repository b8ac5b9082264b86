"""Your own simulator as a world: two robots carry a table across a room.

    cd examples
    pevdn check-env 'pettingzoo:own_world?team-reward=common'
    pevdn train pe-vdn-b --env 'pettingzoo:own_world?team-reward=common' --steps 20000

`Table` stands for a simulator without any learning code; `parallel_env` wraps it for a team. Robots
that always hurry drop the table about every other time, robots that wait for each other rarely.
"""

import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

ROOM, LONGEST = 4.0, 20  # metres, steps
# An agent observes its own end and the strain; it can wait, walk or hurry.
OBSERVATION, ACTION = Box(-np.inf, np.inf, (2,)), Discrete(3)


class Table:
    """Two robots with slipping wheels pull one end each; it falls if one is 0.6 m ahead."""

    def __init__(self, seed: int | None) -> None:
        self.generator = np.random.default_rng(seed)
        self.ends = self.generator.uniform(0.0, 0.4, 2)

    def pull(self, speeds: np.ndarray) -> None:
        self.ends = self.ends + speeds * self.generator.choice([0.5, 1.0], 2)

    @property
    def strain(self) -> float:
        return float(self.ends[1] - self.ends[0])


class parallel_env(ParallelEnv):
    """Both agents observe their own end and the strain; the reward is the table's progress."""

    metadata = {"name": "own_world", "render_modes": []}  # noqa: RUF012
    possible_agents = ["left", "right"]  # noqa: RUF012
    max_steps = LONGEST

    def observation_space(self, agent):
        return OBSERVATION

    def action_space(self, agent):
        return ACTION

    def reset(self, seed=None, options=None):
        self.agents, self.table, self.steps = [*self.possible_agents], Table(seed), 0
        return self._observations(), {agent: {} for agent in self.agents}

    def step(self, actions):
        before = self.table.ends.min()
        self.table.pull(np.array([actions[agent] * 0.25 for agent in self.agents]))
        self.steps += 1
        fell, arrived = abs(self.table.strain) > 0.6, self.table.ends.min() >= ROOM
        reward = -1.0 if fell else float(self.table.ends.min() - before)
        both, over, late = self.agents, bool(fell or arrived), self.steps == LONGEST
        if over or late:
            self.agents = []
        return (
            self._observations(),
            dict.fromkeys(both, reward),
            dict.fromkeys(both, over),  # terminated: the game is over
            dict.fromkeys(both, late and not over),  # truncated: the time limit ended it
            {agent: {"won": bool(arrived and not fell)} for agent in both},
        )

    def _observations(self):
        ends, strain = self.table.ends / ROOM, self.table.strain
        return {
            "left": np.array([ends[0], strain], np.float32),
            "right": np.array([ends[1], -strain], np.float32),
        }
