"""When a team plays, updates and evaluates: public counters and what follows from them.

Both runtimes call these functions: the simulation with arrays, mapped over lanes, a party with
plain numbers. They use operators only, so that both get the same answer.
"""

from __future__ import annotations

from typing import Any

from pevdn.config.experiment import Config

Number = Any  # an int, or an integer array of one lane


def evaluations(config: Config) -> int:
    """Return the number of evaluations of a run: one before the first step, then by eval_every."""
    return -(-config.steps // config.settings.eval_every) + 1


def steps_before(evaluation: int, config: Config) -> int:
    """Return the environment steps that precede an evaluation (0 is the first)."""
    return min(evaluation * config.settings.eval_every, config.steps)


def slots(episodes: Number, e: Any, buffer_size: int) -> Any:
    """Return the slot of the e-th of the next episodes; the newest replaces the oldest."""
    return (episodes + e) % buffer_size


def opening_ages(config: Config) -> list[int]:
    """Return the ages, in episodes, at which an episode is opened: 0, then evenly spaced.

    The last is reached before any episode of the block is overwritten.
    """
    block, n = config.block_size, config.settings.openings
    blocks = config.settings.buffer_size // block
    return [block * (j * blocks // n) for j in range(n)]


def filled(episodes: Number, buffer_size: int) -> Number:
    """Return the number of slots that hold an episode."""
    return episodes - (episodes - buffer_size) * (episodes > buffer_size)


def update_is_due(episodes: Number, coin: Any, config: Config) -> Any:
    """Return whether the next update is made; `coin` is uniform on [0, 1) and public."""
    s = config.settings
    return (episodes >= config.learning_starts) & (coin * s.buffer_throughput < 1)


def exposure(updates: Number, episodes: Number, stored_at: Any, buffer_size: int) -> Number:
    """Return the updates made since the oldest episode in the buffer was stored.

    `stored_at` (buffer_size,) is the number of updates made when each slot was written.
    """
    return updates - stored_at[episodes % buffer_size * (episodes > buffer_size)]
