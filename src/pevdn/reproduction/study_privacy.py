"""Study of privacy: win rate against the proven ε team, with the conditional ε agent beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pevdn import worlds
from pevdn.config import presets
from pevdn.privacy.planner import Plan, smallest_noise
from pevdn.reproduction import measure, paper
from pevdn.reproduction.campaign import Arm
from pevdn.reproduction.drawing import errors, legend, style
from pevdn.reproduction.experiment import VDNS, Request, released_rows
from pevdn.reproduction.measure import Row

NAME, TITLE = "privacy", "Win rate against ε"
ENV, RECIPE = "smax-sc2:3m", "team-8"
SEEDS, STEPS = 8, 400_000
QUICK_SEEDS, QUICK_STEPS = 1, 50_000
EPSILONS = (1, 2, 4, 8, 16)  # for the team observer
QUICK = (1, 4, 16)
COLOURS = {"team": "#D55E00", "agent": "#0072B2"}
LABELS = {"team": "ε team", "agent": "ε agent (conditional)"}


def arms(request: Request) -> list[Arm]:
    """Return VDN and one arm per ε: the recipe with its noise multiplier changed."""

    recipe = request.arm(RECIPE, ENV, None, preset=RECIPE).config
    plan, arms = Plan.of(recipe, worlds.team_size(recipe.env)), request.vdn_arms(ENV, RECIPE)
    for epsilon in QUICK if request.quick else EPSILONS:
        noise = smallest_noise(plan, epsilon, "team").noise_multiplier
        name = f"team-{epsilon:g}"
        arms.append(request.arm(name, ENV, None, preset=RECIPE, noise_multiplier=noise))
    return arms


def left_out(request: Request) -> list[str]:
    return ["ε team of 2 and 8"] if request.quick else []


def original(arm: str, model: str) -> str | None:
    return "vdn" if arm == "vdn" else None


def baselines(arm: str) -> Sequence[str]:
    return VDNS


def _vdn(rows: Sequence[Row]) -> Row:
    """Return the row of the better VDN."""
    return max(released_rows(rows, *VDNS), key=lambda row: row["win_rate"])


def _private(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["released"] and "epsilon_team" in row]


def draw(figure: Any, arms: Sequence[Arm], rows: Sequence[Row]) -> None:
    """Plot each arm as one point per observer, at the ε of its ledger."""
    figure.set_size_inches(7.5, 5)
    axes = figure.add_subplot()
    low, high = EPSILONS[0] * 0.8, EPSILONS[-1] * 1.4
    for observer, colour in COLOURS.items():
        key = f"epsilon_{observer}"
        points = sorted((r for r in _private(rows) if low <= r[key] <= high), key=lambda r: r[key])
        if points:
            errors(axes, [r[key] for r in points], points, colour, f"ours, {LABELS[observer]}")
    vdn = _vdn(rows)
    axes.axhline(vdn["win_rate"], color="0.35", linewidth=1, label="our VDN")
    anchor = measure.published("pe-vdn-c-anchor")
    assert anchor is not None
    rate, (least, most) = float(anchor.final.mean()), paper.CORRECTED
    claimed, corrected = (f"the paper, ε agent, {x}" for x in ("as claimed", "corrected"))
    black = {"color": "black", "zorder": 4}
    axes.plot([paper.EPSILON], [rate], "*", markersize=11, label=claimed, **black)
    axes.plot([least, most], [rate] * 2, "|-", linewidth=2.5, label=corrected, **black)
    axes.set(xscale="log", xlim=(low, high), ylim=(-0.02, 1.02), ylabel="win rate, last quarter")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"ε at δ = {presets.PRESETS[RECIPE].settings['delta']:.3g}")
    legend(axes)
    style(figure, axes, arms)


def conclusions(rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]:
    vdn = _vdn(rows)["win_rate"]
    sentences = [
        f"Every private arm is the recipe {RECIPE} with another noise multiplier; nothing was "
        f"tuned again. VDN has win rate {vdn:.3f}. Both ε of an arm are from its ledger; ε team is "
        "proven, ε agent is conditional."
    ]
    for observer in COLOURS:
        key = f"epsilon_{observer}"
        reached = [row for row in _private(rows) if row["win_rate"] >= measure.GOAL * vdn]
        if vdn == 0 or not reached:
            sentences.append(f"No arm kept 80 % of VDN, whatever its ε {observer}.")
            continue
        least = min(reached, key=lambda row: row[key])
        sentences.append(
            f"The smallest ε {observer} at which an arm kept 80 % of VDN is "
            f"{least[key]:.2f} ({least['arm']}, {least['share_of_vdn']:.0%})."
        )
    ordered = sorted(_private(rows), key=lambda row: row["noise_multiplier"])
    best = max(ordered, key=lambda row: row["win_rate"], default=None)
    if best is not None and math.isfinite(best["epsilon_team"]):
        sentences.append(
            f"The best is {best['arm']} with {best['win_rate']:.3f} at ε team "
            f"{best['epsilon_team']:.2f} (agent, conditional: {best['epsilon_agent']:.2f})."
        )
    sentences.append(
        f"The paper's point is ε agent at δ {paper.DELTA}: as it claims by Theorem 1 (ε "
        f"{paper.EPSILON:.2f}), and as its settings give if all updates that happen are counted "
        f"({paper.CORRECTED[0]} to {paper.CORRECTED[1]}), which is conditional, too. It is one "
        "run, in StarCraft II."
    )
    return sentences
