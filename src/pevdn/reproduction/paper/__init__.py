"""The paper's published results: the curves of Figure 1, one run each, and its privacy claim."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

EPSILON, DELTA = 2.90, 4.9e-4  # claimed by Theorem 1, for the agent observer
# ε of the agent observer for settings that give 2.90 under that formula, if every update that
# happens is counted. Like every ε of that observer it is conditional (docs/privacy.md).
CORRECTED = (4.5, 6.5)


class Curve(NamedTuple):
    steps: list[float]
    win_rate: list[float]


@cache
def curves(panel: str) -> dict[str, Curve]:
    """Return the curves of panel "a" or "b" of Figure 1, by name."""
    by_name: dict[str, Curve] = {}
    text = (files(__name__) / f"figure1{panel}.csv").read_text()
    for row in csv.DictReader(text.splitlines()):
        curve = by_name.setdefault(row["algorithm"], Curve([], []))
        curve.steps.append(float(row["env_steps"]))
        curve.win_rate.append(float(row["win_rate"]))
    return by_name


def curve(name: str) -> Curve | None:
    """Return one curve of either panel; None if the paper has no curve of that name."""
    return {**curves("a"), **curves("b")}.get(name)
