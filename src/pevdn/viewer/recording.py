"""An episode as it was played: plain values, so that it is drawn anywhere and kept as JSON.

A recording shows what an observer of the whole simulation sees, not what any agent saw. Its
scene says once what stays the same; its views say what changes:

| scene      | holds                                       | a view holds                        |
|------------|---------------------------------------------|-------------------------------------|
| `field`    | `bodies`, `walls` or none, `links` of goals | `at`, `health`, `shots` by body     |
| `pictures` |                                             | `png`, as text in base64            |
| `table`    |                                             | `text`, where the game stands       |

The first bodies of a field are the agents. A step may have several views; the last is its end.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

View = dict[str, Any]


@dataclass(frozen=True)
class PlayedStep:
    """One step: what everyone chose, and what came of it."""

    actions: list[int]  # by agent
    reward: float
    views: list[View]
    q_values: list[float] | None = None  # (A,) of the agent asked for, as it chose
    available: list[bool] | None = None  # (A,) open to it then


@dataclass(frozen=True)
class Recording:
    """One greedy episode of a trained team."""

    world: str
    algorithm: str
    model: str
    seed: int | None  # of the training; None if that is private, because noise may follow from it
    episode: int
    actions: list[list[dict[str, Any]]]  # by agent and action: a `name`, and `move` or `target`
    scene: dict[str, Any]
    start: View
    steps: list[PlayedStep]
    ending: str  # "won", "lost" or "time is up"
    q_values_of: int | None = None  # whose Q-values are in it
    lane: int | None = None  # the team's number in a private run, in place of the seed

    @property
    def which(self) -> str:
        """Which team of the run it is."""
        return f"seed {self.seed}" if self.lane is None else f"team {self.lane}"

    @property
    def total_reward(self) -> float:
        return sum(step.reward for step in self.steps)

    @property
    def won(self) -> bool:
        return self.ending == "won"

    def as_json(self) -> dict[str, Any]:
        """Plain values; `seed` or `lane`, whichever there is."""
        absent = {name for name in ("seed", "lane") if getattr(self, name) is None}
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in absent}
