"""One played episode as plain values, which any program can draw and JSON can hold.

A recording shows the full state of the simulation, not what any agent observed. The scene holds
what stays the same, the frames what changes:

| scene      | holds                                       | a frame holds                       |
|------------|---------------------------------------------|-------------------------------------|
| `field`    | `bodies`, `walls` or none, `links` to goals | `at`, `health`, `shots` by body     |
| `pictures` |                                             | `png`, base64                       |
| `table`    |                                             | `text`, the state of the game       |

The first bodies of a field are the agents. A step has one or more frames; the last is its end.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

Frame = dict[str, Any]


@dataclass(frozen=True)
class PlayedStep:
    """One step: the actions, and their result."""

    actions: list[int]  # by agent
    reward: float
    frames: list[Frame]
    q_values: list[float] | None = None  # (A,) of agent `q_values_of`, before the step
    available: list[bool] | None = None  # (A,) its available actions


@dataclass(frozen=True)
class Recording:
    """One greedy episode of a trained team."""

    world: str
    algorithm: str
    model: str
    seed: int | None  # of the training; None for a private run, whose noise may follow from it
    episode: int
    actions: list[list[dict[str, Any]]]  # by agent and action: a `name`, and `move` or `target`
    scene: dict[str, Any]
    start: Frame
    steps: list[PlayedStep]
    ending: str  # "won", "lost" or "time is up"
    q_values_of: int | None = None  # the agent whose Q-values are included
    lane: int | None = None  # instead of the seed, for a private run

    @property
    def which(self) -> str:
        """Return the seed or the lane of the team, as text."""
        return f"seed {self.seed}" if self.lane is None else f"team {self.lane}"

    @property
    def total_reward(self) -> float:
        return sum(step.reward for step in self.steps)

    @property
    def won(self) -> bool:
        return self.ending == "won"

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with either `seed` or `lane`."""
        absent = {name for name in ("seed", "lane") if getattr(self, name) is None}
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in absent}
