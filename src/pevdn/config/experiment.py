"""The configuration of an experiment: algorithm, world, steps, seeds and settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pevdn.config import algorithms
from pevdn.config.algorithms import ALGORITHMS
from pevdn.config.runtime import RuntimeOptions
from pevdn.config.settings import MOST, Settings, make_settings, number, setting_fields
from pevdn.errors import UsageError

_LATER = {"bootstrap_timeouts", "openings", "message_norm", "opening_noise", "colluders"}
STEPS = 400_000  # default length of a training, as in the paper's experiment


@dataclass(frozen=True)
class Config:
    """Everything that defines an experiment; equal configurations give equal metrics."""

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
    def noised(self) -> bool:
        """Whether openings are noised, so that each agent then learns alone from its own sample."""
        return self.exchange == "noised"

    @property
    def sampling(self) -> str:
        """How minibatches are drawn: the privacy of DP-SGD rests on Poisson sampling."""
        return "poisson" if self.private else "uniform"

    @property
    def sampling_rate(self) -> float:
        """q = expected batch size / buffer size."""
        return sampling_rate(self.settings.expected_batch_size, self.settings.buffer_size)

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

    @cached_property
    def identity(self) -> str:
        """A short hash; `load` replaces it where an earlier version hashed other things."""
        return _hash(_without_later_settings(dataclasses.asdict(self)))


def sampling_rate(batch_size: int, buffer_size: int) -> float:
    """Return q, the probability that a stored episode is in a Poisson sample."""
    return batch_size / buffer_size


def updates_due(parallel_episodes: int, update_every: int) -> int:
    """Updates that one block of episodes calls for."""
    return -(-parallel_episodes // update_every)


def default_delta(episodes: int) -> float:
    """Return δ for a stream of at most this many episodes (an episode has one step or more)."""
    return 1 / (10 * episodes)


def quarter(buffer_size: int) -> int:
    """Return the default number of episodes before the first private update."""
    return -(-buffer_size // 4)


def make(
    algorithm_name: str,
    env: str = "smax-sc2:3m",
    steps: int = STEPS,
    seeds: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """Return a checked configuration; values may be text, as on the command line."""
    algorithm = algorithms.find(algorithm_name)
    config = Config(
        algorithm.name,
        env,
        number("steps", steps, int, 1, MOST),
        number("seeds", seeds, int, 1, 10_000),
        number("seed", seed, int, 0, MOST),
        make_settings({**algorithm.defaults, **(settings or {})}),
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
    if config.noised and s.openings > (fitting := s.buffer_size // config.block_size):
        raise UsageError(
            f"openings is {s.openings}, but an episode stays in the buffer for {fitting} blocks of "
            f"{config.block_size} episodes and is opened at most once in each; lower openings or "
            "raise buffer_size."
        )
    if config.noised and s.relation != "zero-out":
        raise UsageError(
            f"relation is '{s.relation}', but {config.algorithm} is accounted for with 'zero-out' "
            "only, where one agent's record of an episode is empty; leave it out."
        )
    if s.budget_observer == "record" and s.epsilon_budget and not config.noised:
        raise UsageError(
            "budget_observer is 'record', but no ε holds against teammates in "
            f"{config.algorithm}; set it to team, or train pe-vdn-d."
        )
    if s.exploration_end > s.exploration_start:
        raise UsageError(
            f"exploration_end is {s.exploration_end}, but ε never rises; it must not exceed "
            f"exploration_start={s.exploration_start}."
        )
    if s.epsilon_budget and not config.private:
        raise UsageError(
            f"epsilon_budget is {s.epsilon_budget:g}, but {config.algorithm} is not differentially "
            "private; train pe-vdn-d, or leave the budget out."
        )
    silent = ["noise_multiplier"] + ["opening_noise"] * (s.budget_observer == "record")
    for name in silent if s.epsilon_budget else []:
        if getattr(s, name) == 0:
            raise UsageError(
                f"epsilon_budget is {s.epsilon_budget:g}, but {name} is 0, so that ε is infinite "
                f"from the first update on; raise {name}."
            )


# ---- config.yaml -----------------------------------------------------------------------------


def fingerprint(config: Config) -> str:
    """Return what a checkpoint, a ledger and a run must have in common."""
    return config.identity


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _without_later_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out settings that were added later and have their defaults: old runs lack them."""
    fields = setting_fields()
    known = {
        name: value
        for name, value in values["settings"].items()
        if name not in _LATER or value != fields[name].default
    }
    return {**values, "settings": known}


def to_text(config: Config, options: RuntimeOptions | None = None) -> str:
    """Return the content of config.yaml."""
    import yaml

    runtime = {} if options is None else {"runtime": dataclasses.asdict(options)}
    return yaml.safe_dump({**dataclasses.asdict(config), **runtime}, sort_keys=False)


def load(path: Path) -> Config:
    """Read the configuration in a config.yaml."""
    return load_with_options(path)[0]


def load_with_options(path: Path) -> tuple[Config, RuntimeOptions]:
    """Read the configuration and the runtime options in a config.yaml, also of earlier versions."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
        kept, runtime = _without_old_names(path, data["algorithm"], data["settings"])
        config = make(
            data["algorithm"], data["env"], data["steps"], data["seeds"], data["seed"], kept
        )
        if len(kept) < len(data["settings"]):
            vars(config)["identity"] = _old_identity(config, data["settings"])
        return config, RuntimeOptions().replace({**runtime, **(data.get("runtime") or {})})
    except OSError:
        raise UsageError(
            f"{path} cannot be read; is {path.parent} the directory of a run?"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as problem:
        reason = " ".join(str(problem).split())
        raise UsageError(
            f"{path} is not a run's configuration ({type(problem).__name__}: {reason})."
        ) from None


# ---- run directories of earlier versions -------------------------------------------------------

_OLD_OPTIONS = {
    "buffer": "buffer",
    "envs": "workers",
    "world_timeout": "world_timeout",
    "checkpoint_every": "checkpoint_every",
}


def _without_old_names(
    path: Path, algorithm: str, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split old settings into settings and runtime options; drop those that had no effect."""
    kept = dict(settings)
    runtime = {new: kept.pop(old) for old, new in _OLD_OPTIONS.items() if old in kept}
    if "budget_view" in kept:
        kept["budget_observer"] = kept.pop("budget_view")
    kept.pop("target_every", None)  # without effect, unless target_update was hard
    sampling = "poisson" if algorithms.find(algorithm).private else "uniform"
    always = {"clipping": "whole", "target_update": "soft", "sampling": sampling}
    for name, value in always.items():
        if kept.pop(name, value) != value:
            raise UsageError(
                f"{path} has {name}={settings[name]}, which this version of pevdn does not support "
                f"(only {value}); use the version that wrote it, or train anew."
            )
    return kept, runtime


def _old_identity(config: Config, settings: Mapping[str, Any]) -> str:
    """Return the fingerprint that the checkpoints and the ledger of an old run carry."""
    values = dataclasses.asdict(config)
    known = {name: value for name, value in values["settings"].items() if name in settings}
    old = {**settings, **known}
    without = {"envs", "world_timeout"}
    without |= {"buffer"} if old.get("buffer") == "device" else set()
    without |= {"randomness"} if old.get("randomness") != "os" else set()
    values["settings"] = {name: value for name, value in old.items() if name not in without}
    return _hash(_without_later_settings(values))
