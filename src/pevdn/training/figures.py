"""The learning curve of a run, as a picture and as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pevdn.config.experiment import Config
from pevdn.privacy.accounting import Spent
from pevdn.training.directory import Run
from pevdn.training.metrics import by_seed
from pevdn.training.summary import MODELS, column

Series = list[tuple[float, float]]


def mean_curve(lines: Sequence[dict[str, Any]], name: str) -> Series:
    """Return (steps, value) for each evaluation, the mean over the seeds that have the value."""
    points: Series = []
    for together in zip(*by_seed(lines).values(), strict=False):
        values = [line[name] for line in together if line.get(name) is not None]
        if values:
            steps = sum(line["env_steps"] for line in together) / len(together)
            points.append((steps, sum(values) / len(values)))
    return points


def draw_curve(run: Run, guaranteed: Spent | None = None) -> Path:
    """Draw curve.png: the win rate of each seed, and their mean, against environment steps."""
    path = run.path / "curve.png"
    draw_lines(run.config, run.metrics, path, guaranteed)
    return path


def draw_lines(
    config: Config, lines: Sequence[dict[str, Any]], path: Path, guaranteed: Spent | None = None
) -> None:
    """Draw the curves of lines of metrics.jsonl, titled with the guaranteed ε."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for curve in by_seed(lines).values():
        axes.plot(
            *zip(*[(x["env_steps"], x["win_rate"]) for x in curve], strict=True),
            color="C0",
            alpha=0.25,
            linewidth=1,
        )
    colours = {"": "C0", "anchor": "C3", "average": "C2"}
    for model, colour in colours.items():
        if mean := mean_curve(lines, column("win_rate", model)):
            axes.plot(*zip(*mean, strict=True), color=colour, label=MODELS[model])
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False)
    title = f"{config.algorithm} on {config.env}, {config.seeds} seed{'s' * (config.seeds > 1)}"
    if guaranteed is not None:
        record = guaranteed.epsilon_record
        first = "" if record is None else f"ε record {record:.2f}, "
        title += (
            f"\n{first}ε team {guaranteed.epsilon_team:.2f}, "
            f"ε agent {guaranteed.epsilon_agent:.2f} (conditional) at δ = {guaranteed.delta:.2g}"
        )
    axes.set(title=title, xlabel="environment steps", ylabel="win rate", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def text_curve(points: Series, width: int = 60, height: int = 8) -> str:
    """Draw a curve with block characters; values are between 0 and 1."""
    if not points:
        return ""
    end = points[-1][0] or 1
    columns: list[list[float]] = [[] for _ in range(width)]
    for steps, value in points:
        columns[min(width - 1, int(steps / end * width))].append(value)
    heights, last = [], 0.0
    for values in columns:
        last = sum(values) / len(values) if values else last
        heights.append(round(last * height * 8))
    blocks = " ▁▂▃▄▅▆▇█"
    rows = []
    for row in range(height - 1, -1, -1):
        label = {height - 1: "1.0", 0: "0.0"}.get(row, "   ")
        rows.append(f"{label} │" + "".join(blocks[max(0, min(8, h - 8 * row))] for h in heights))
    rows.append("    └" + "─" * width)
    rows.append("     0" + f"{end:,.0f} steps".rjust(width - 1))
    return "\n".join(rows)
