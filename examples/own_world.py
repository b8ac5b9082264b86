"""A simulator of your own as a world: two robots carry a table across a room.

    cd examples
    pevdn check-env 'pettingzoo:own_world?team-reward=common'
    pevdn train pe-vdn-b --env 'pettingzoo:own_world?team-reward=common' --steps 20000

`Table` stands for a simulator that knows nothing of learning; `parallel_env` is what a team needs
of it. Who always hurries drops the table every other time; who waits for the other, far less often.
"""

import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

ROOM, LONGEST = 4.0, 20  # metres, steps
SEES, MOVES = Box(-np.inf, np.inf, (2,)), Discrete(3)  # own end and strain; wait, walk, hurry


class Table:
    """Each end is pulled by a robot, whose wheels slip; it falls if one is 0.6 m ahead."""

    def __init__(self, seed: int | None) -> None:
        self.chance = np.random.default_rng(seed)
        self.ends = self.chance.uniform(0.0, 0.4, 2)

    def pull(self, speeds: np.ndarray) -> None:
        self.ends = self.ends + speeds * self.chance.choice([0.5, 1.0], 2)

    @property
    def strain(self) -> float:
        return float(self.ends[1] - self.ends[0])


class parallel_env(ParallelEnv):
    """Both see their own end and feel the strain, and are paid for how far the table gets."""

    metadata = {"name": "own_world", "render_modes": []}  # noqa: RUF012
    possible_agents = ["left", "right"]  # noqa: RUF012
    max_steps = LONGEST

    def observation_space(self, agent):
        return SEES

    def action_space(self, agent):
        return MOVES

    def reset(self, seed=None, options=None):
        self.agents, self.table, self.steps = [*self.possible_agents], Table(seed), 0
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions):
        before = self.table.ends.min()
        self.table.pull(np.array([actions[agent] * 0.25 for agent in self.agents]))
        self.steps += 1
        fell, there = abs(self.table.strain) > 0.6, self.table.ends.min() >= ROOM
        paid = -1.0 if fell else float(self.table.ends.min() - before)
        both, over, late = self.agents, bool(fell or there), self.steps == LONGEST
        if over or late:
            self.agents = []
        return (
            self._seen(),
            dict.fromkeys(both, paid),
            dict.fromkeys(both, over),  # terminated: the game is over
            dict.fromkeys(both, late and not over),  # truncated: only the time is up
            {agent: {"won": bool(there and not fell)} for agent in both},
        )

    def _seen(self):
        ends, strain = self.table.ends / ROOM, self.table.strain
        return {
            "left": np.array([ends[0], strain], np.float32),
            "right": np.array([ends[1], -strain], np.float32),
        }
