"""Win rate against ε, for an observer of one agent and for one of the whole team."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pevdn.experiment import paper, presets
from pevdn.experiment.reproduction import measure
from pevdn.experiment.reproduction.campaign import Arm
from pevdn.experiment.reproduction.drawing import errors, legend, style
from pevdn.experiment.reproduction.measure import Row
from pevdn.experiment.reproduction.wanted import VDNS, Wanted, among

NAME, TITLE = "privacy", "Win rate against ε"
ENV, RECIPE = "smax-sc2:3m", "private-2.9"
SEEDS, STEPS = 8, 400_000
QUICK_SEEDS, QUICK_STEPS = 1, 50_000
EPSILONS = (0.5, 1, 2, 2.9, 5, 10)
QUICK = (1, 2.9, 10)
NEAR = (
    0.1  # noise multipliers closer than that are as good as the same: an arm has an ε of each view
)
COLOURS = {"agent": "#0072B2", "team": "#D55E00"}


def arms(wanted: Wanted) -> list[Arm]:
    """The noise multiplier for each ε and view, everything else as in the recipe; and VDN."""
    from pevdn import worlds
    from pevdn.privacy.planner import Plan, smallest_noise

    recipe = wanted.arm(RECIPE, ENV, None, preset=RECIPE).config
    sizes = {world.id: world.agents for world in worlds.available()}  # without starting JAX
    plan = Plan.of(recipe, sizes.get(recipe.env) or len(worlds.make(recipe.env).agents))
    views = {view: QUICK if wanted.quick else EPSILONS for view in COLOURS}
    if wanted.quick:
        del views["team"]
    found, noises = wanted.vdns(ENV, RECIPE), list[float]()
    for view, epsilons in views.items():
        for epsilon in epsilons:
            noise = smallest_noise(plan, epsilon, view).noise_multiplier
            if any(abs(noise / other - 1) < NEAR for other in noises):
                continue
            noises.append(noise)
            name = f"{view}-{epsilon:g}"
            found.append(wanted.arm(name, ENV, None, preset=RECIPE, noise_multiplier=noise))
    return found


def left_out(wanted: Wanted) -> list[str]:
    return ["noise chosen for the team view, and ε of 0.5, 2 and 5"] if wanted.quick else []


def original(arm: str, model: str) -> str | None:
    return "vdn" if arm == "vdn" else None


def baselines(arm: str) -> Sequence[str]:
    return VDNS


def _vdn(rows: Sequence[Row]) -> Row:
    """The better one."""
    return max(among(rows, *VDNS), key=lambda row: row["win_rate"])


def _private(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["released"] and "epsilon_agent" in row]


def draw(figure: Any, arms: Sequence[Arm], rows: Sequence[Row]) -> None:
    """Every arm is a point for each view, at the ε of its ledger."""
    figure.set_size_inches(7.5, 5)
    axes = figure.add_subplot()
    low, high = EPSILONS[0] * 0.8, EPSILONS[-1] * 1.4
    for view, colour in COLOURS.items():
        key = f"epsilon_{view}"
        points = sorted((r for r in _private(rows) if low <= r[key] <= high), key=lambda r: r[key])
        if points:
            errors(axes, [r[key] for r in points], points, colour, f"ours, {view} view")
    vdn = _vdn(rows)
    axes.axhline(vdn["win_rate"], color="0.35", linewidth=1, label="our VDN")
    anchor = measure.published("pe-vdn-c-anchor")
    assert anchor is not None
    rate, (least, most) = float(anchor.final.mean()), paper.SOUND
    black = {"color": "black", "zorder": 4}
    axes.plot([paper.EPSILON], [rate], "*", markersize=11, label="the paper, as claimed", **black)
    axes.plot([least, most], [rate] * 2, "|-", linewidth=2.5, label="the paper, sound", **black)
    axes.set(xscale="log", xlim=(low, high), ylim=(-0.02, 1.02), ylabel="win rate, last quarter")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"ε at δ = {presets.PRESETS[RECIPE].settings['delta']:.3g}")
    legend(axes)
    style(figure, axes, arms)


def words(rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]:
    vdn = _vdn(rows)["win_rate"]
    told = [
        f"Every private arm is the recipe {RECIPE} with another noise multiplier; nothing was "
        f"tuned again. VDN wins {vdn:.3f}. An arm's ε of both views is from its ledger."
    ]
    for view in COLOURS:
        key = f"epsilon_{view}"
        reached = [row for row in _private(rows) if row["win_rate"] >= measure.GOAL * vdn]
        if vdn == 0 or not reached:
            told.append(f"No arm kept 80 % of VDN, whatever its ε in the {view} view.")
            continue
        least = min(reached, key=lambda row: row[key])
        told.append(
            f"The smallest ε in the {view} view at which 80 % of VDN were kept is "
            f"{least[key]:.2f} ({least['arm']}, {least['share_of_vdn']:.0%})."
        )
    ordered = sorted(_private(rows), key=lambda row: row["noise_multiplier"])
    best = max(ordered, key=lambda row: row["win_rate"], default=None)
    if best is not None and math.isfinite(best["epsilon_agent"]):
        told.append(
            f"The best is {best['arm']} with {best['win_rate']:.3f} at ε agent "
            f"{best['epsilon_agent']:.2f} and team {best['epsilon_team']:.2f}."
        )
    told.append(
        f"The paper's point is drawn where it claims to be (ε {paper.EPSILON:.2f}) and where its "
        f"settings are by sound accounting (ε {paper.SOUND[0]} to {paper.SOUND[1]}); it was one "
        "run, in StarCraft II."
    )
    return told
