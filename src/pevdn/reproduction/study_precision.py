"""Study of PRECISION, the number of decimal places in the encoding of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pevdn.reproduction.campaign import Arm
from pevdn.reproduction.drawing import errors, legend, style
from pevdn.reproduction.experiment import Request, released_row
from pevdn.reproduction.measure import Row

NAME, TITLE = "precision", "Win rate against PRECISION"
ENV, EXACT = "smax-sc2:3m", "vdn"  # EXACT has the same gradient, from the exact sum
SEEDS, STEPS = 8, 400_000
QUICK_SEEDS, QUICK_STEPS = 1, 50_000
QUICK = (0, 2, 5, 7)


def arms(request: Request) -> list[Arm]:
    places = QUICK if request.quick else range(8)
    shared = [request.arm(f"precision-{p}", ENV, "pe-vdn-b", precision=p) for p in places]
    return [request.arm(EXACT, ENV, EXACT), *shared]


def left_out(request: Request) -> list[str]:
    return ["precision 1, 3, 4 and 6"] if request.quick else []


def original(arm: str, model: str) -> str | None:
    return {EXACT: EXACT, "precision-5": "pe-vdn-b"}.get(arm)


def baselines(arm: str) -> Sequence[str]:
    return [EXACT]


def draw(figure: Any, arms: Sequence[Arm], rows: Sequence[Row]) -> None:
    figure.set_size_inches(7.5, 4.2)
    axes = figure.add_subplot()
    exact = released_row(rows, EXACT)
    axes.axhline(exact["win_rate"], color="0.35", linewidth=1, label="exact sum (vdn)")
    if exact["win_rate_low"] is not None:
        axes.axhspan(exact["win_rate_low"], exact["win_rate_high"], color="0.35", alpha=0.15)
    shared = [row for row in rows if row["arm"] != EXACT]
    errors(axes, [row["precision"] for row in shared], shared, "#0072B2", "pe-vdn-b")
    refused = [arm.config.settings.precision for arm in arms if arm.refused]
    if refused:
        axes.plot(refused, [0.02] * len(refused), "x", color="#D55E00", label="refused")
    axes.set(xlabel="PRECISION", ylabel="win rate, last quarter", ylim=(-0.02, 1.02))
    axes.set_xticks(range(8))
    legend(axes)
    style(figure, axes, arms)


def conclusions(rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]:
    exact = released_row(rows, EXACT)
    sentences = [
        "The opened sum has an error of at most N/2 · 10^−PRECISION, and a message must be within "
        "±p/(2·N·10^PRECISION): few decimals round the team error away, many limit its range. "
        f"The exact sum ({EXACT}) has win rate {exact['win_rate']:.3f}."
    ]
    for row in (row for row in rows if row["arm"] != EXACT):
        low, high = row["share_of_vdn_low"], row["share_of_vdn_high"]
        verdict = "no significant difference"
        if low is None:
            verdict = "these seeds cannot show a difference"
        elif low > 1 or high < 1:
            verdict = "better" if low > 1 else "worse"
        sentences.append(
            f"Precision {row['precision']}: {row['win_rate']:.3f}, messages within "
            f"±{row['message_limit']:,.0f}; {verdict}."
        )
    return sentences
