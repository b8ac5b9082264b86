"""Every setting of a training run: name, default, meaning and range, in one place.

Settings carry the paper's names.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from pevdn.errors import UsageError, unknown

MOST = 2_000_000_000  # whole numbers are 32 bits wide in the compiled program


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


def checked(name: str, value: Any) -> Any:
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
