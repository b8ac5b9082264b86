"""`pevdn replay`: watch a trained team."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json


def main(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Output file: .html, .gif, .mp4 or .json (default: RUN/replay.html).",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the team (default: the first of the run).")
    ] = None,
    model: Annotated[str, typer.Option(help="Model: best, running, average or anchor.")] = "best",
    episode: Annotated[
        int, typer.Option(help="Number of the episode, as in `pevdn evaluate`.")
    ] = 0,
    q_values: Annotated[
        int | None, typer.Option(metavar="AGENT", help="Show the Q-values of this agent.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Play one greedy episode of a trained team and draw it."""
    from rich.console import Console
    from rich.progress import Progress

    from pevdn.viewer import replay

    out = out or run / "replay.html"
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("playing", total=None)

        def drawn(done: int, total: int) -> None:
            bar.update(task, description="drawing", completed=done, total=total)

        choice: dict[str, Any] = {"seed": seed, "model": model, "episode": episode}
        recording = replay(run, out, **choice, q_values=q_values, progress=drawn)
    document = {
        "run": str(run),
        "out": str(out),
        "bytes": out.stat().st_size,
        "world": recording.world,
        **({"seed": recording.seed} if recording.lane is None else {"lane": recording.lane}),
        "model": model,
        "episode": episode,
        "drawn_as": recording.scene["kind"],
        "steps": len(recording.steps),
        "return": recording.total_reward,
        "ending": recording.ending,
    }
    if as_json:
        print_json(document)
        return
    typer.echo(
        f"{recording.world}, episode {episode}: {recording.ending} after {len(recording.steps)} "
        f"steps, return {recording.total_reward:.2f}\n{out}"
    )
