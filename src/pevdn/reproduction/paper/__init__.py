"""What the paper published: the curves of its Figure 1, one run each, and its claim of privacy."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

EPSILON, DELTA = 2.90, 4.9e-4  # claimed by Theorem 1, of the agent view
# ε of the agent view for settings that give 2.90 under that formula, if every update that happens
# is counted. Like every figure of that view it is conditional (docs/privacy.md).
CORRECTED = (4.5, 6.5)


class Curve(NamedTuple):
    steps: list[float]
    win_rate: list[float]


@cache
def curves(panel: str) -> dict[str, Curve]:
    """The curves of panel "a" or "b" of Figure 1, by name."""
    found: dict[str, Curve] = {}
    text = (files(__name__) / f"figure1{panel}.csv").read_text()
    for row in csv.DictReader(text.splitlines()):
        curve = found.setdefault(row["algorithm"], Curve([], []))
        curve.steps.append(float(row["env_steps"]))
        curve.win_rate.append(float(row["win_rate"]))
    return found


def curve(name: str) -> Curve | None:
    """One curve, of either panel; None if the paper has none of that name."""
    return {**curves("a"), **curves("b")}.get(name)
