"""`pevdn train`: from a name to a trained team."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json


def main(
    algorithm: Annotated[str, typer.Argument(help="iql, vdn, pe-vdn-a, pe-vdn-b or pe-vdn-c.")],
    env: Annotated[str, typer.Option(help="World; `pevdn worlds` lists them.")] = "smax-sc2:3m",
    preset: Annotated[
        str | None, typer.Option(help="A recipe to start from; `pevdn presets` lists them.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Environment steps per seed (default: the preset's, or 400,000)."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Independent runs, trained side by side.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the run (default: runs/NAME-TIME).")
    ] = None,
    devices: Annotated[
        str, typer.Option(metavar="N|all", help="GPUs (or CPU devices) that share the seeds.")
    ] = "1",
    buffer: Annotated[
        str | None, typer.Option(help="Where episodes are kept: device, or host for large teams.")
    ] = None,
    envs: Annotated[
        int | None,
        typer.Option(help="WorkerPool side by side of a world outside of JAX (default: by cores)."),
    ] = None,
    epsilon_budget: Annotated[
        float | None,
        typer.Option(help="Stop before ε (team view; or --set budget_observer=agent) exceeds it."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting; `pevdn config` lists them."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a team and write a run directory: metrics, checkpoints, summary and curve."""
    from pevdn.config import presets
    from pevdn.config.settings import parse_assignments
    from pevdn.training import loop as run
    from pevdn.training.progress import observer

    settings: dict[str, Any] = {**parse_assignments(assignments or [])}
    if buffer is not None:
        settings["buffer"] = buffer
    if envs is not None:
        settings["envs"] = envs
    if epsilon_budget is not None:
        settings["epsilon_budget"] = epsilon_budget
    wanted = presets.configure(algorithm, env, steps, seeds, seed, settings, preset)
    presets.check_team(preset, settings, wanted)
    show(run.begin(wanted, out, observer(), devices), as_json)


def show(run: Any, as_json: bool) -> None:
    """How it ended: figures, the curve, and where to look next."""
    summary = run.summary
    if as_json:
        print_json({**summary, "run": str(run.path)})
        return
    from pevdn.training.figures import mean_curve, text_curve
    from pevdn.training.summary import MODELS, column, describe, released

    model = released(summary)
    typer.echo(f"\nwin rate of the {MODELS[model]}")
    typer.echo(text_curve(mean_curve(run.metrics, column("win_rate", model))))
    typer.echo("\n" + describe(summary))
    typer.echo(f"\npicture  {run.path / 'curve.png'}\nrun      {run.path}")
