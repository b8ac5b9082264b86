"""What the team does next, from what everybody knows: the order of Algorithm 1, in rounds.

A round is something that the whole team completes or none of it: a block of episodes, one update,
or one evaluation. After the same rounds every party has the same `Course`, so that nobody has to
be told what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pevdn.config.experiment import Config

PLAY, UPDATE, EVALUATE, END = "play", "update", "evaluate", "end"


@dataclass(frozen=True)
class Course:
    """Counters that are public within the team."""

    round: int = 0  # completed
    blocks: int = 0  # of episodes
    env_steps: int = 0
    episodes: int = 0
    updates: int = 0
    looked_at: int = 0  # updates of this block that were made, or turned out not to be due
    evaluations: int = 0  # of all models
    scored: int = 0  # models in the evaluation under way
    exposure: int = 0  # the most updates that any one episode was in the buffer for
    exhausted_at: int = -1  # evaluations made when the privacy budget was spent; −1: it is not
    anchored: bool = False
    threshold: float = 0.0  # win rate that the next anchor must beat
    seed: str = ""  # of this block's minibatches, hexadecimal
    scores: tuple[tuple[float, float, float], ...] = ()  # of the evaluation under way
    stored_at: tuple[int, ...] = field(default=(), repr=False)  # updates when a block was stored

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Course:
        """From what `dataclasses.asdict` and JSON made of it."""
        lists = {
            "stored_at": tuple(facts["stored_at"]),
            "scores": tuple(map(tuple, facts["scores"])),
        }
        return cls(**{**facts, **lists})

    def moved(self, **changes: Any) -> Course:
        """After one more round."""
        return replace(self, round=self.round + 1, **changes)


def block_size(config: Config) -> int:
    """Episodes played side by side: parallel_episodes, up to a multiple of update_every."""
    return config.block_size


def updates_due(config: Config) -> int:
    """Updates that are due after one block of episodes."""
    return config.block_size // config.settings.update_every


def models(config: Config, anchored: bool) -> list[str]:
    """What is evaluated, in this order; as in the simulation."""
    s = config.settings
    return ["params"] + ["average"] * (s.average_decay > 0) + ["anchor"] * anchored


def next_kind(course: Course, config: Config) -> str:
    """Of the next round; an update may still turn out not to be due."""
    s = config.settings
    exhausted = course.exhausted_at >= 0
    if course.blocks and course.looked_at < updates_due(config) and not exhausted:
        return UPDATE
    if course.scored:
        return EVALUATE
    last = -(-config.steps // s.eval_every)
    if course.evaluations > (course.exhausted_at if exhausted else last):
        return END
    until = min(course.evaluations * s.eval_every, config.steps)
    return PLAY if course.env_steps < until and not exhausted else EVALUATE


def with_block(course: Course, config: Config, lengths: int, seed: bytes) -> Course:
    """After one more block of episodes, `lengths` steps in all."""
    kept = -(-config.settings.buffer_size // block_size(config)) + 1
    return course.moved(
        blocks=course.blocks + 1,
        env_steps=course.env_steps + lengths,
        episodes=course.episodes + block_size(config),
        looked_at=0,
        seed=seed.hex(),
        stored_at=(*course.stored_at, course.updates)[-kept:],
    )


def exposed(course: Course, config: Config) -> int:
    """Updates made since the oldest episode that is in the buffer was stored."""
    gone = max(0, course.episodes - config.settings.buffer_size) // block_size(config)
    return course.updates - course.stored_at[gone - course.blocks] if course.blocks else 0
