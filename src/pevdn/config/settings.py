"""The settings of an experiment: name, default, meaning and range of each, in one place.

Names follow the paper. Options that only change how a run is computed are in `config.runtime`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pevdn.errors import UsageError, unknown

MOST = 2_000_000_000  # integers are 32 bits wide in the compiled program
LARGEST = 1e9  # norm or noise, so that no product of them leaves the range of 32-bit floats


def setting(
    default: Any,
    meaning: str,
    low: float = -math.inf,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a dataclass field with its meaning and the values that `checked` accepts."""
    if high is None:
        high = MOST if isinstance(default, int) else math.inf
    metadata = {"meaning": meaning, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """The values of `--set name=value`."""

    # replay
    buffer_size: int = setting(
        5000, "episodes kept by each agent; the newest replaces the oldest", 1
    )
    expected_batch_size: int = setting(32, "episodes in a minibatch; with DP, on average", 1)
    learning_starts: int = setting(
        0, "episodes before the first update; 0: one minibatch, with DP a quarter of the buffer", 0
    )
    update_every: int = setting(1, "episodes between updates", 1)
    buffer_throughput: float = setting(
        1.0, "a due update happens with probability 1/buffer_throughput", 1.0
    )
    parallel_episodes: int = setting(
        8, "episodes played side by side before their updates are made", 1, 4096
    )
    # learning
    gamma: float = setting(0.99, "discount factor γ", 0.0, 1.0)
    learning_rate: float = setting(5e-4, "step size of the optimiser", 0.0)
    optimizer: str = setting("adam", "adam or sgd", choices=("adam", "sgd"))
    momentum: float = setting(0.9, "momentum of sgd, or β1 of adam", 0.0, 0.999999)
    weight_decay: float = setting(0.0, "weight decay (sgd: L2; adam: decoupled)", 0.0)
    max_gradient_norm: float = setting(
        10.0, "norm that each agent's gradient is scaled down to; without DP only", 0.0
    )
    double_q: bool = setting(
        True, "double Q-learning: the online network selects the next action, the target rates it"
    )
    target_rate: float = setting(
        0.005, "fraction that the target network moves at each update", 0.0, 1.0
    )
    return_lambda: float = setting(0.0, "λ of the λ-returns; 0: one-step targets", 0.0, 1.0)
    reward_cap: float = setting(0.0, "per-step reward cap while learning; 0 disables it", 0.0)
    learning_rate_end: float = setting(
        1.0, "fraction of learning_rate reached after learning_rate_steps", 0.0, 1.0
    )
    learning_rate_steps: int = setting(
        400_000, "environment steps of the linear learning-rate schedule", 1
    )
    bootstrap_timeouts: bool = setting(
        True, "bootstrap an episode that the step limit ended; false: treat its end as terminal"
    )
    average_decay: float = setting(
        0.0, "decay of the moving average of the parameters; 0 disables it", 0.0, 1.0
    )
    network: str = setting(
        "recurrent",
        "recurrent: GRU; entities: feed-forward, entities of one type share an encoder",
        choices=("recurrent", "entities"),
    )
    hidden_size: int = setting(64, "units of each hidden layer", 1)
    # acting
    exploration_start: float = setting(1.0, "ε of ε-greedy at the first step", 0.0, 1.0)
    exploration_end: float = setting(0.05, "ε after exploration_steps", 0.0, 1.0)
    exploration_steps: int = setting(50_000, "environment steps of the linear ε schedule", 1)
    # exchange
    precision: int = setting(5, "decimal places kept when a message is encoded", 0, 7)
    modulus: int = setting(2**32, "p: secret shares are integers modulo p", 2, 2**32)
    openings: int = setting(
        1, "n: how often the team error of an episode is opened while it is stored; pe-vdn-d", 1, 64
    )
    message_norm: float = setting(
        0.5, "M: largest norm of one record's messages in an opening; pe-vdn-d", 1e-12, LARGEST
    )
    opening_noise: float = setting(
        1.0,
        "standard deviation of the noise that hides a record in an opening, in units of "
        "message_norm; pe-vdn-d",
        0.0,
        LARGEST,
    )
    colluders: int = setting(
        0, "t: teammates that may pool what they see; 0: all but one; pe-vdn-d", 0
    )
    # differential privacy
    noise_multiplier: float = setting(
        1.0, "standard deviation of the noise, in units of clip_norm", 0.0, LARGEST
    )
    clip_norm: float = setting(0.5, "C: largest norm of one record's gradient", 1e-12, LARGEST)
    randomness: str = setting(
        "auto",
        "source of noise and minibatches: seed (reproducible) or os (secret); auto: os with DP in "
        "external worlds and in objects, else seed",
        choices=("auto", "seed", "os"),
    )
    delta: float = setting(
        0.0, "δ at which ε is reported; 0: 1/(10 · steps), a tenth of 1/episodes", 0.0, 0.999999
    )
    relation: str = setting(
        "zero-out",
        "neighbouring relation of ε",
        choices=("zero-out", "add-or-remove", "replace-one"),
    )
    epsilon_budget: float = setting(
        0.0, "training stops before ε of the budget_observer exceeds this; 0: no budget", 0.0
    )
    budget_observer: str = setting(
        "team",
        "observer whose ε is limited: record (pe-vdn-d), team, or agent, which is not proven",
        choices=("record", "team", "agent"),
    )
    anchor: bool = setting(
        False, "keep the best-evaluated model (the average, if kept) and penalise distance to it"
    )
    anchor_threshold: float = setting(
        0.25, "win rate that an evaluation must exceed to set the first anchor", 0.0, 1.0
    )
    anchor_penalty: float = setting(
        1e-3, "weight of the squared distance to the anchor in the loss", 0.0
    )
    # evaluation
    eval_every: int = setting(5000, "environment steps between evaluations", 1)
    eval_episodes: int = setting(32, "greedy episodes per evaluation", 1)


_OPTION = "is a runtime option, not a setting; use --{0}, or {1}=… in Python."
_REMOVED = "was removed, because {0}; leave it out."
_SOFT = "the target network always moves by target_rate at each update"
OLD_NAMES = {  # settings of earlier versions, and what replaces them
    "buffer": _OPTION.format("buffer", "buffer"),
    "envs": _OPTION.format("workers", "workers"),
    "world_timeout": _OPTION.format("world-timeout", "world_timeout"),
    "checkpoint_every": _OPTION.format("checkpoint-every", "checkpoint_every"),
    "clipping": _REMOVED.format("gradients are always clipped as a whole"),
    "sampling": _REMOVED.format(
        "it follows from the algorithm: Poisson with differential privacy, uniform without"
    ),
    "target_update": _REMOVED.format(_SOFT),
    "target_every": _REMOVED.format(_SOFT),
    "budget_view": "was renamed; set budget_observer instead.",
}


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """Parse the values of --set, such as `["gamma=0.9", …]`."""
    pairs = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set got '{text}', but takes name=value, as in gamma=0.95.")
        pairs[name.strip()] = value.strip()
    return pairs


def setting_fields() -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(Settings)}


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Return checked settings; values may be text."""
    fields = setting_fields()
    for name in values:
        if name in OLD_NAMES:
            raise UsageError(f"{name} {OLD_NAMES[name]}")
        if name not in fields:
            raise unknown("setting", name, fields, "`pevdn config` lists all of them.")
    return Settings(**{name: checked(fields[name], value) for name, value in values.items()})


def is_zero(value: Any) -> bool:
    """Whether a setting is 0 in all lanes; a traced number, which differs by lane, never is."""
    return isinstance(value, int | float) and value == 0


def checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value in the field's type and range, or raise an error that names it."""
    meta, kind = field.metadata, type(field.default)
    if kind in (int, float):
        return number(field.name, value, kind, meta["low"], meta["high"])
    parsed = _typed(field.name, value, kind)
    if meta["choices"] and parsed not in meta["choices"]:
        raise unknown(f"value of {field.name}:", parsed, meta["choices"])
    return parsed


def number(name: str, value: Any, kind: type, low: float, high: float) -> Any:
    """Return a number of this type and range, or raise an error that names it."""
    parsed = _typed(name, value, kind)
    if not low <= parsed <= high:
        bound = f"at least {low:.10g}" if parsed < low else f"at most {high:.10g}"
        raise UsageError(f"{name} is {parsed}, but must be {bound}.")
    return parsed


def _typed(name: str, value: Any, kind: type) -> Any:
    try:
        return _parse(value, kind)
    except (ValueError, TypeError, OverflowError):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
        raise UsageError(f"{name} is '{value}', but must be {words[kind]}.") from None


def _parse(value: Any, kind: type) -> Any:
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in words:
            raise ValueError
        return words[str(value).lower()]
    if isinstance(value, bool):
        raise ValueError
    if kind is int:
        if isinstance(value, str) and "**" in value:  # 2**31-1 for 2147483647
            base, _, rest = value.partition("**")
            exponent, minus, less = rest.partition("-")
            return int(base) ** min(int(exponent), 99) - (int(less) if minus else 0)
        number = float(str(value).replace("_", "")) if not isinstance(value, int) else value
        if number != int(number):
            raise ValueError
        return int(number)
    if kind is float:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
        return number
    return str(value)
