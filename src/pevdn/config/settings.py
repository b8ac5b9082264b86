"""Every setting of a training run: name, default, meaning and range, in one place.

Settings carry the paper's names. The five algorithms are two axes (how the team's sum is formed,
and whether gradients are made differentially private) plus defaults that go with them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pevdn.errors import UsageError, unknown

MOST = 2_000_000_000  # whole numbers are 32 bits wide in the compiled program
STEPS = 400_000  # of a training, unless it is told: as in the paper's experiment


def _setting(
    default: Any,
    meaning: str,
    low: float = -math.inf,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    if high is None:
        high = MOST if isinstance(default, int) else math.inf
    return field(
        default=default,
        metadata={"meaning": meaning, "low": low, "high": high, "choices": choices},
    )


@dataclass(frozen=True)
class Settings:
    """What can be set with `--set name=value`."""

    # replay
    buffer_size: int = _setting(
        5000, "episodes each agent keeps; the newest replaces the oldest", 1
    )
    buffer: str = _setting(
        "device",
        "where episodes are kept; host: small, in the machine's memory, for large teams",
        choices=("device", "host"),
    )
    expected_batch_size: int = _setting(32, "episodes in a minibatch (on average, if Poisson)", 1)
    sampling: str = _setting(
        "uniform",
        "how minibatches are drawn; with DP always poisson",
        choices=("uniform", "poisson"),
    )
    learning_starts: int = _setting(
        0,
        "episodes before the first update; 0: one minibatch, with DP a quarter of the buffer",
        0,
    )
    update_every: int = _setting(1, "episodes from one update to the next, exactly", 1)
    buffer_throughput: float = _setting(
        1.0, "an update that is due happens with probability 1/buffer_throughput", 1.0
    )
    parallel_episodes: int = _setting(
        8, "episodes played side by side before the updates they call for are made", 1, 4096
    )
    # learning
    gamma: float = _setting(0.99, "discount factor γ", 0.0, 1.0)
    learning_rate: float = _setting(5e-4, "step size of the optimiser", 0.0)
    optimizer: str = _setting("adam", "adam or sgd", choices=("adam", "sgd"))
    momentum: float = _setting(0.9, "momentum of sgd, or β1 of adam", 0.0, 0.999999)
    weight_decay: float = _setting(0.0, "weight decay (with sgd: L2; with adam: decoupled)", 0.0)
    max_gradient_norm: float = _setting(
        10.0, "each agent's gradient is scaled down to this norm; without DP only", 0.0
    )
    double_q: bool = _setting(
        True, "the online network chooses the next action, the target values it"
    )
    target_update: str = _setting(
        "soft", "how the target network follows", choices=("soft", "hard")
    )
    target_rate: float = _setting(0.005, "soft: fraction moved at each update", 0.0, 1.0)
    target_every: int = _setting(200, "hard: updates from one copy to the next", 1)
    return_lambda: float = _setting(
        0.0, "λ of the returns that values are fitted to; 0: the next value alone", 0.0, 1.0
    )
    reward_cap: float = _setting(
        0.0, "a step's reward counts for this much at most; 0: for all that it is", 0.0
    )
    learning_rate_end: float = _setting(
        1.0, "fraction of learning_rate that is left after learning_rate_steps", 0.0, 1.0
    )
    learning_rate_steps: int = _setting(
        400_000, "environment steps over which learning_rate falls, in a line", 1
    )
    average_decay: float = _setting(
        0.0, "weight of the past in the average of parameters at an update; 0: none kept", 0.0, 1.0
    )
    network: str = _setting(
        "recurrent",
        "recurrent: a GRU; entities: feed-forward, like things share an encoder",
        choices=("recurrent", "entities"),
    )
    hidden_size: int = _setting(64, "units of the recurrent layer, or of every layer", 1)
    # acting
    exploration_start: float = _setting(1.0, "ε of ε-greedy at the first step", 0.0, 1.0)
    exploration_end: float = _setting(0.05, "ε at the end of exploration_steps and after", 0.0, 1.0)
    exploration_steps: int = _setting(50_000, "environment steps from start to end", 1)
    # exchange
    precision: int = _setting(5, "decimal places that the encoding of a message keeps", 0, 7)
    modulus: int = _setting(2**32, "p: secret shares are integers modulo p", 2, 2**32)
    # differential privacy
    noise_multiplier: float = _setting(1.0, "noise standard deviation over clip_norm", 0.0)
    clip_norm: float = _setting(0.5, "C: the most one episode's gradient may weigh", 1e-12)
    clipping: str = _setting(
        "whole",
        "arrays: each array of a gradient to its even share of clip_norm, not the whole to it",
        choices=("whole", "arrays"),
    )
    randomness: str = _setting(
        "auto",
        "where noise and minibatches come from: seed (can be repeated), or os (a secret); auto: os "
        "with DP in worlds outside of JAX and in objects",
        choices=("auto", "seed", "os"),
    )
    delta: float = _setting(
        0.0,
        "δ at which ε is reported; 0: 1/(10·steps), a tenth of one over the most episodes",
        0.0,
        0.999999,
    )
    relation: str = _setting(
        "zero-out",
        "neighbouring streams that ε is about",
        choices=("zero-out", "add-or-remove", "replace-one"),
    )
    epsilon_budget: float = _setting(
        0.0, "training stops before ε of the budget_observer exceeds this; 0: no budget", 0.0
    )
    budget_observer: str = _setting(
        "team", "whose ε the budget is for; only team is proven", choices=("team", "agent")
    )
    anchor: bool = _setting(
        False, "keep the best-evaluated model (the average, if kept) as anchor and stay near"
    )
    anchor_threshold: float = _setting(
        0.25, "an evaluation must beat this win rate to set the first anchor", 0.0, 1.0
    )
    anchor_penalty: float = _setting(
        1e-3, "weight of the squared distance to the anchor in the loss", 0.0
    )
    # evaluation and saving
    eval_every: int = _setting(5000, "environment steps from one evaluation to the next", 1)
    eval_episodes: int = _setting(32, "greedy episodes of an evaluation", 1)
    checkpoint_every: int = _setting(50_000, "environment steps from one checkpoint to the next", 1)
    # worlds outside of JAX
    envs: int = _setting(
        0,
        "copies of a world outside of JAX; 0: one an episode played side by side, 4 a core at most",
        0,
        1024,
    )
    world_timeout: float = _setting(
        120.0, "seconds that a world outside of JAX has for a step, or to start an episode", 0.01
    )


@dataclass(frozen=True)
class Algorithm:
    """A name for a point on the two axes, with the defaults that go with it."""

    name: str
    exchange: str
    private: bool
    crosses: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm("iql", "alone", False, "nothing"),
        Algorithm("vdn", "central", False, "everything (the baseline that breaks the policy)"),
        Algorithm("pe-vdn-a", "broadcast", False, "m_i in the clear"),
        Algorithm("pe-vdn-b", "secret_shared", False, "shares of m_i"),
        Algorithm(
            "pe-vdn-c",
            "secret_shared",
            True,
            "shares of m_i; gradients are clipped and noised",
            {
                "buffer_size": 4096,
                "expected_batch_size": 128,
                "sampling": "poisson",
                "update_every": 4,
                "parallel_episodes": 32,
                "learning_rate": 8e-3,
                "learning_rate_end": 0.1,
                "learning_rate_steps": 350_000,
                "target_rate": 0.05,
                "return_lambda": 0.3,
                "reward_cap": 2.0,
                "network": "entities",
                "hidden_size": 32,
                "noise_multiplier": 1.71,
                "clip_norm": 0.2,
                "average_decay": 0.998,
            },
        ),
    )
}


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
    def block_size(self) -> int:
        """Episodes played between updates: parallel_episodes, up to a multiple of update_every."""
        s = self.settings
        return -(-s.parallel_episodes // s.update_every) * s.update_every

    @property
    def learning_starts(self) -> int:
        s = self.settings
        return s.learning_starts or (
            quarter(s.buffer_size) if self.private else s.expected_batch_size
        )


def default_delta(episodes: int) -> float:
    """δ for a stream of at most so many episodes: every episode has a step, or more."""
    return 1 / (10 * episodes)


def quarter(buffer_size: int) -> int:
    """Episodes that private learning waits for, unless it is told."""
    return -(-buffer_size // 4)


def algorithm(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


def make(
    algorithm_name: str,
    env: str = "smax-sc2:3m",
    steps: int = STEPS,
    seeds: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """A checked configuration; values may be text, as they come from the command line."""
    chosen = algorithm(algorithm_name)
    values = {**chosen.defaults, **(settings or {})}
    config = Config(
        chosen.name,
        env,
        number("steps", steps, int, 1, MOST),
        number("seeds", seeds, int, 1, 10_000),
        number("seed", seed, int, 0, MOST),
        Settings(**{name: _checked(name, value) for name, value in values.items()}),
    )
    _check_together(config)
    return config


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """`["gamma=0.9", …]` as given to --set."""
    pairs = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set got '{text}', but takes name=value, as in gamma=0.95.")
        pairs[name.strip()] = value.strip()
    return pairs


def setting_fields() -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(Settings)}


def _checked(name: str, value: Any) -> Any:
    fields = setting_fields()
    if name not in fields:
        raise unknown("setting", name, fields, "`pevdn config` lists all of them.")
    meta, wanted = fields[name].metadata, type(fields[name].default)
    if wanted in (int, float):
        return number(name, value, wanted, meta["low"], meta["high"])
    parsed = _typed(name, value, wanted)
    if meta["choices"] and parsed not in meta["choices"]:
        raise unknown(f"value of {name}:", parsed, meta["choices"])
    return parsed


def number(name: str, value: Any, wanted: type, low: float, high: float) -> Any:
    """A checked number, or an error that names it."""
    parsed = _typed(name, value, wanted)
    if not low <= parsed <= high:
        bound = f"at least {low:.10g}" if parsed < low else f"at most {high:.10g}"
        raise UsageError(f"{name} is {parsed}, but must be {bound}.")
    return parsed


def _typed(name: str, value: Any, wanted: type) -> Any:
    try:
        return _parse(value, wanted)
    except (ValueError, TypeError, OverflowError):
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
        raise UsageError(f"{name} is '{value}', but must be {kind[wanted]}.") from None


def _parse(value: Any, wanted: type) -> Any:
    if wanted is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in words:
            raise ValueError
        return words[str(value).lower()]
    if isinstance(value, bool):
        raise ValueError
    if wanted is int:
        if isinstance(value, str) and "**" in value:  # 2**31-1 reads better than 2147483647
            base, _, rest = value.partition("**")
            exponent, minus, less = rest.partition("-")
            return int(base) ** min(int(exponent), 99) - (int(less) if minus else 0)
        number = float(str(value).replace("_", "")) if not isinstance(value, int) else value
        if number != int(number):
            raise ValueError
        return int(number)
    if wanted is float:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
        return number
    return str(value)


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
