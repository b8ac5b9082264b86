"""Win rate against PRECISION, the decimal places that the encoding of a message keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pevdn.reproduction.campaign import Arm
from pevdn.reproduction.drawing import errors, legend, style
from pevdn.reproduction.measure import Row
from pevdn.reproduction.targets import Wanted, find

NAME, TITLE = "precision", "Win rate against PRECISION"
ENV, EXACT = "smax-sc2:3m", "vdn"  # the same gradient from the exact sum
SEEDS, STEPS = 8, 400_000
QUICK_SEEDS, QUICK_STEPS = 1, 50_000
QUICK = (0, 2, 5, 7)


def arms(wanted: Wanted) -> list[Arm]:
    places = QUICK if wanted.quick else range(8)
    shared = [wanted.arm(f"precision-{p}", ENV, "pe-vdn-b", precision=p) for p in places]
    return [wanted.arm(EXACT, ENV, EXACT), *shared]


def left_out(wanted: Wanted) -> list[str]:
    return ["precision 1, 3, 4 and 6"] if wanted.quick else []


def original(arm: str, model: str) -> str | None:
    return {EXACT: EXACT, "precision-5": "pe-vdn-b"}.get(arm)


def baselines(arm: str) -> Sequence[str]:
    return [EXACT]


def draw(figure: Any, arms: Sequence[Arm], rows: Sequence[Row]) -> None:
    figure.set_size_inches(7.5, 4.2)
    axes = figure.add_subplot()
    exact = find(rows, EXACT)
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


def words(rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]:
    exact = find(rows, EXACT)
    told = [
        "The opened sum is off by at most N/2 · 10^−PRECISION, and a message has to be inside "
        "±p/(2·N·10^PRECISION): few decimals round the team's error away, many leave it little "
        f"room. The exact sum ({EXACT}) wins {exact['win_rate']:.3f}."
    ]
    for row in (row for row in rows if row["arm"] != EXACT):
        low, high = row["share_of_vdn_low"], row["share_of_vdn_high"]
        if low is None:
            verdict = "these seeds cannot tell"
        else:
            verdict = (
                "not told apart from it" if low <= 1 <= high else "better" if low > 1 else "worse"
            )
        told.append(
            f"Precision {row['precision']}: {row['win_rate']:.3f}, messages inside "
            f"±{row['message_limit']:,.0f}; {verdict}."
        )
    return told
