"""Public counters of a team, and the step of the protocol that follows from them.

A step is one block of episodes, one opening, one update or one evaluation; the whole team completes
it or none of it does. After the same steps all parties have equal counters, so no party has to
announce the next step. The rules themselves are in `agent/schedule.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pevdn.agent import evaluation, schedule
from pevdn.config.experiment import Config

PLAY, OPEN, UPDATE, EVALUATE, END = "play", "open", "update", "evaluate", "end"


@dataclass(frozen=True)
class Progress:
    """Counters that are public within the team."""

    step: int = 0  # completed steps of the protocol
    blocks: int = 0  # of episodes
    env_steps: int = 0
    episodes: int = 0
    updates: int = 0
    considered: int = 0  # updates of this block that were made or not due
    evaluations: int = 0  # of all models
    exposure: int = 0  # the most updates that any one episode was in the buffer for
    exhausted_at: int = -1  # evaluations made when the privacy budget was spent; −1: it is not
    anchored: bool = False
    threshold: float = 0.0  # win rate that the next anchor must exceed
    seed: str = ""  # of this block's public coins and common minibatches, hexadecimal
    scores: tuple[tuple[float, float, float], ...] = ()  # of the evaluation under way, by model
    stored_at: tuple[int, ...] = field(default=(), repr=False)  # updates made, by buffer slot

    @classmethod
    def begin(cls, config: Config) -> Progress:
        s = config.settings
        return cls(threshold=s.anchor_threshold, stored_at=(0,) * s.buffer_size)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """Read what `dataclasses.asdict` and JSON made of the counters."""
        lists = {
            "stored_at": tuple(values["stored_at"]),
            "scores": tuple(map(tuple, values["scores"])),
        }
        return cls(**{**values, **lists})

    def advance(self, **changes: Any) -> Progress:
        """Return the counters after one more step."""
        return replace(self, step=self.step + 1, **changes)

    def after_block(self, config: Config, env_steps: int, seed: bytes) -> Progress:
        """Return the counters after a block of episodes with `env_steps` steps in all."""
        stored_at, size = list(self.stored_at), config.settings.buffer_size
        for e in range(config.block_size):
            stored_at[schedule.slots(self.episodes, e, size)] = self.updates
        return self.advance(
            blocks=self.blocks + 1,
            env_steps=self.env_steps + env_steps,
            episodes=self.episodes + config.block_size,
            considered=0,
            seed=seed.hex(),
            stored_at=tuple(stored_at),
        )

    def after_update(self, config: Config) -> Progress:
        """Return the counters after an update, which may be a part of a step."""
        made = replace(self, updates=self.updates + 1, considered=self.considered + 1)
        return replace(made, exposure=max(self.exposure, made.current_exposure(config)))

    def current_exposure(self, config: Config) -> int:
        """Return the number of updates since the oldest episode in the buffer was stored."""
        size = config.settings.buffer_size
        return int(schedule.exposure(self.updates, self.episodes, self.stored_at, size))

    def oldest_block(self, config: Config) -> int:
        """Return the first block that the buffer still holds, in whole or in part."""
        gone = self.episodes - schedule.filled(self.episodes, config.settings.buffer_size)
        return int(gone // config.block_size)

    def models(self, config: Config) -> list[str]:
        """Return the models that exist, in the order of their evaluation."""
        every = evaluation.models(config.settings)
        return [model for model in every if model != "anchor" or self.anchored]

    def next_kind(self, config: Config) -> str:
        """Return the kind of the next step; an update may still turn out not to be due.

        If openings are noised, updates are no steps: they follow the opening of their block.
        """
        exhausted = self.exhausted_at >= 0
        if self.blocks and self.considered < config.updates_due and not exhausted:
            return OPEN if config.noised else UPDATE
        if self.scores:
            return EVALUATE
        last = self.exhausted_at + 1 if exhausted else schedule.evaluations(config)
        if self.evaluations >= last:
            return END
        until = schedule.steps_before(self.evaluations, config)
        return PLAY if self.env_steps < until and not exhausted else EVALUATE
