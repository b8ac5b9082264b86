"""Which models of an agent are evaluated, which becomes the anchor, and what is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pevdn.config.settings import Settings

MODELS = ("params", "anchor", "average")  # fields of `Learner`; the order numbers their keys


class Score(NamedTuple):
    """Means over the greedy episodes of one evaluation."""

    win_rate: Any
    total_reward: Any
    length: Any


def models(s: Settings) -> list[str]:
    """Return the models that an evaluation scores, in order; the anchor is last."""
    return ["params"] + ["average"] * bool(s.average_decay) + ["anchor"] * s.anchor


def candidate(s: Settings) -> str:
    """Return the model that becomes the anchor if its win rate beats the threshold."""
    return "average" if s.average_decay else "params"


def beats(win_rate: Any, threshold: Any) -> Any:
    """Return whether an evaluation of the candidate sets a new anchor and threshold."""
    return win_rate > threshold


def key_number(evaluation: int, model: str) -> int:
    """Return the number of an evaluation's key (`keys.of_evaluation`), one per model."""
    return len(MODELS) * evaluation + MODELS.index(model)


def metrics_line(
    seed: int,
    counters: Mapping[str, int],
    scores: Mapping[str, Score | None],
    spent: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Return a line of metrics.jsonl, from the public counters and the scores by model.

    A model that does not exist yet has the score None; `spent` is the privacy spent so far, without
    the figures that the algorithm does not have (None).
    """
    running = scores["params"]
    assert running is not None
    line: dict[str, Any] = {
        "seed": seed,
        **{name: int(counters[name]) for name in ("env_steps", "episodes", "updates")},
        "win_rate": float(running.win_rate),
        "return": float(running.total_reward),
        "episode_length": float(running.length),
    }
    for model in ("average", "anchor"):  # whatever the order of `scores`: JAX sorts dictionaries
        if model in scores:
            score = scores[model]
            line[f"win_rate_{model}"] = None if score is None else float(score.win_rate)
            line[f"return_{model}"] = None if score is None else float(score.total_reward)
    return line | {name: value for name, value in (spent or {}).items() if value is not None}
