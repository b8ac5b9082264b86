"""Elements that the figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pevdn.reproduction.campaign import Arm
from pevdn.reproduction.measure import Row


def errors(axes: Any, x: Sequence[float], rows: Sequence[Row], colour: str, label: str) -> None:
    """Plot win rates with their intervals, joined by a line."""
    rates = [row["win_rate"] for row in rows]
    axes.plot(x, rates, "o-", color=colour, label=label)
    for place, row in zip(x, rows, strict=True):
        if row["win_rate_low"] is not None:
            axes.vlines(place, row["win_rate_low"], row["win_rate_high"], color=colour, alpha=0.6)


def style(figure: Any, axes: Any, arms: Sequence[Arm]) -> None:
    """Style the figure of a study and give it a title."""
    clear(axes)
    config = arms[0].config
    seeds = f"{config.seeds} seeds, 95 % bootstrap intervals" if config.seeds > 1 else "one seed"
    worlds = dict.fromkeys(arm.config.env for arm in arms)
    figure.suptitle(f"{', '.join(worlds)}: {config.steps:,} steps, {seeds}", fontsize=10.5)


def clear(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Any, *more: Any, columns: int = 3) -> None:
    """Place the legend below the axes."""
    handles = [*axes.get_legend_handles_labels()[0], *more]
    axes.legend(
        handles=handles,
        fontsize=8.5,
        ncols=columns,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        frameon=False,
    )
