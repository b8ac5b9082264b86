"""Draw the results of all attacks in one figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw AUC by channel, by team size, and by algorithm and ε, with 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1.4))
    for axes in panels:
        axes.axhline(0.5, color="0.5", linewidth=1, linestyle="--")
        axes.grid(alpha=0.3, axis="y")
    features = list(document["features"])
    rows = [row for row in document["teammate"] if row["auc"] is not None]
    _channels(panels[0], rows, features)
    _team_sizes(panels[1], rows, features)
    _membership(panels[2], document["membership"])
    panels[0].set(ylabel="AUC (0.5 is guessing)", ylim=(0.25, 1.03))
    panels[0].legend(frameon=False, title="private feature")
    figure.suptitle(f"Attacks on {document['algorithm']}, {document['env']}")
    figure.savefig(path, dpi=150)


def _channels(axes: Any, rows: list[Row], features: list[str]) -> None:
    own = [row for row in rows if not row["composed"]]
    channels = list(dict.fromkeys(row["channel"] for row in own))
    for number, feature in enumerate(features):
        points = [row for row in own if row["feature"] == feature]
        places = [channels.index(row["channel"]) + 0.15 * (number - 1) for row in points]
        _points(axes, places, points, f"C{number}", "o", feature)
    axes.set_xticks(range(len(channels)), [name.replace(" but", "\nbut") for name in channels])
    axes.set(title="teammate attack, by channel")


def _team_sizes(axes: Any, rows: list[Row], features: list[str]) -> None:
    for number, feature in enumerate(features):
        sums = [r for r in rows if r["channel"] == "opened sum" and r["feature"] == feature]
        points = [row for row in sums if row["composed"]]
        _points(axes, [r["agents"] for r in points], points, f"C{number}", ".", None, "-")
        real = [row for row in sums if not row["composed"]]
        _points(axes, [r["agents"] + 0.15 for r in real], real, f"C{number}", "*", None)
    axes.set(
        title="the opened sum, by team size",
        xlabel="agents (★ the run's own team, dots composed)",
        xticks=sorted({row["agents"] for row in rows}),
    )


def _membership(axes: Any, rows: list[Row]) -> None:
    labels = list(dict.fromkeys(_label(row) for row in rows))
    for observer, colour, marker in (("agent", "C4", "o"), ("team", "C5", "s")):
        points = [row for row in rows if row["observer"] == observer]
        places = [
            labels.index(_label(row)) + (0.1 if observer == "team" else -0.1) for row in points
        ]
        name = "from one agent" if observer == "agent" else "from the whole team"
        _points(axes, places, points, colour, marker, name)
    for place, label in enumerate(labels):
        allowed = next(row["largest_auc"] for row in rows if _label(row) == label)
        axes.hlines(allowed, place - 0.3, place + 0.3, color="0.3", linewidth=2)
    axes.plot([], [], color="0.3", linewidth=2, label="bound by the team's ε")
    axes.set_xticks(range(len(labels)), labels, fontsize="small")
    axes.legend(frameon=False, loc="lower left")
    axes.set(title="membership inference", xlabel="ε of the team")


def _label(row: Row) -> str:
    if row["epsilon_team"] is None:
        return str(row["algorithm"])
    value = "∞" if row["epsilon_team"] == math.inf else f"{row['epsilon_team']:.3g}"
    name = f"own {row['own']}" if row["own"] else row["algorithm"]
    return f"{name}\nε {value}"


def _points(
    axes: Any,
    places: list[float],
    rows: list[Row],
    colour: str,
    marker: str,
    label: str | None,
    line: str = "",
) -> None:
    values = [row["auc"] for row in rows]
    reach = [[r["auc"] - r["low"] for r in rows], [r["high"] - r["auc"] for r in rows]]
    size = 9 if marker == "*" else 5
    how = {"color": colour, "marker": marker, "markersize": size, "linestyle": line}
    axes.errorbar(places, values, reach, linewidth=1, capsize=2, label=label, **how)
