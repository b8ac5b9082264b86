"""The configuration of a run: algorithm, world, steps, seeds and settings, checked together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pevdn.config import algorithms
from pevdn.config.algorithms import ALGORITHMS
from pevdn.config.settings import MOST, Settings, checked, number
from pevdn.errors import UsageError

STEPS = 400_000  # of a training, unless it is told: as in the paper's experiment


@dataclass(frozen=True)
class Config:
    """All that defines a run; `config.yaml` holds exactly this."""

    algorithm: str
    env: str
    steps: int
    seeds: int
    seed: int
    settings: Settings

    @property
    def exchange(self) -> str:
        return ALGORITHMS[self.algorithm].exchange

    @property
    def private(self) -> bool:
        return ALGORITHMS[self.algorithm].private

    @property
    def sampling_rate(self) -> float:
        """q = expected batch size / buffer size."""
        return self.settings.expected_batch_size / self.settings.buffer_size

    @property
    def delta(self) -> float:
        return self.settings.delta or default_delta(self.steps)

    @property
    def updates_due(self) -> int:
        """Updates that one block of episodes calls for."""
        return updates_due(self.settings.parallel_episodes, self.settings.update_every)

    @property
    def block_size(self) -> int:
        """Episodes played between updates: parallel_episodes, up to a multiple of update_every."""
        return self.updates_due * self.settings.update_every

    @property
    def learning_starts(self) -> int:
        s = self.settings
        return s.learning_starts or (
            quarter(s.buffer_size) if self.private else s.expected_batch_size
        )


def updates_due(parallel_episodes: int, update_every: int) -> int:
    """Updates that one block of episodes calls for."""
    return -(-parallel_episodes // update_every)


def default_delta(episodes: int) -> float:
    """δ for a stream of at most so many episodes: every episode has a step, or more."""
    return 1 / (10 * episodes)


def quarter(buffer_size: int) -> int:
    """Episodes that private learning waits for, unless it is told."""
    return -(-buffer_size // 4)


def make(
    algorithm_name: str,
    env: str = "smax-sc2:3m",
    steps: int = STEPS,
    seeds: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """A checked configuration; values may be text, as they come from the command line."""
    chosen = algorithms.find(algorithm_name)
    values = {**chosen.defaults, **(settings or {})}
    config = Config(
        chosen.name,
        env,
        number("steps", steps, int, 1, MOST),
        number("seeds", seeds, int, 1, 10_000),
        number("seed", seed, int, 0, MOST),
        Settings(**{name: checked(name, value) for name, value in values.items()}),
    )
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    s = config.settings
    if s.expected_batch_size > s.buffer_size:
        raise UsageError(
            f"expected_batch_size is {s.expected_batch_size}, but a buffer of buffer_size="
            f"{s.buffer_size} episodes cannot give that many; lower one or raise the other."
        )
    if config.block_size > s.buffer_size:
        raise UsageError(
            f"buffer_size is {s.buffer_size}, but {config.block_size} episodes are played before "
            f"their updates are made (parallel_episodes={s.parallel_episodes}, rounded up to a "
            f"multiple of update_every={s.update_every}), and the buffer must hold all of them; "
            "raise buffer_size, or lower the other two."
        )
    if config.learning_starts > s.buffer_size:
        raise UsageError(
            f"learning_starts is {s.learning_starts}, but the buffer never holds more than "
            f"buffer_size={s.buffer_size} episodes."
        )
    if s.exploration_end > s.exploration_start:
        raise UsageError(
            f"exploration_end is {s.exploration_end}, but exploration only ever falls; it must not "
            f"be above exploration_start={s.exploration_start}."
        )
    if s.epsilon_budget and not config.private:
        raise UsageError(
            f"epsilon_budget is {s.epsilon_budget:g}, but {config.algorithm} is not differentially "
            "private; train pe-vdn-c, or leave the budget out."
        )
    if s.epsilon_budget and s.noise_multiplier == 0:
        raise UsageError(
            f"epsilon_budget is {s.epsilon_budget:g}, but noise_multiplier is 0, so that ε is "
            "infinite from the first update on; raise noise_multiplier."
        )
    if config.private and s.sampling != "poisson":
        raise UsageError(
            f"sampling is '{s.sampling}', but {config.algorithm} needs 'poisson': "
            "its privacy rests on it."
        )


def fingerprint(config: Config) -> str:
    """What must be equal for a checkpoint or a ledger to belong to a run."""
    values = dataclasses.asdict(config)
    if config.settings.buffer == "device":  # as it was before there was a choice
        del values["settings"]["buffer"]
    if config.settings.randomness != "os":
        del values["settings"]["randomness"]
    for name in ("envs", "world_timeout"):  # how it is played, not what
        del values["settings"][name]
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_text(config: Config) -> str:
    """The content of config.yaml."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def load(path: Path) -> Config:
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
        return make(
            data["algorithm"],
            data["env"],
            data["steps"],
            data["seeds"],
            data["seed"],
            data["settings"],
        )
    except OSError:
        raise UsageError(
            f"{path} cannot be read; is {path.parent} the directory of a run?"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as problem:
        reason = " ".join(str(problem).split())
        raise UsageError(
            f"{path} is not a run's configuration ({type(problem).__name__}: {reason})."
        ) from None
