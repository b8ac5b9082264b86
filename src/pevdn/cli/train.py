"""`pevdn train`: train a team."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.options import Buffer, CheckpointEvery, Devices, Workers, WorldTimeout
from pevdn.cli.output import Json, print_json


def main(
    algorithm: Annotated[str, typer.Argument(help="One that `pevdn algorithms` lists.")],
    env: Annotated[str, typer.Option(help="World id; `pevdn worlds` lists them.")] = "smax-sc2:3m",
    preset: Annotated[
        str | None, typer.Option(help="Preset to start from; `pevdn presets` lists them.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Environment steps per seed (default: the preset's, or 400,000)."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Independent teams, trained side by side.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting; `pevdn config` lists them."),
    ] = None,
    epsilon_budget: Annotated[
        float | None,
        typer.Option(
            help="Stop before ε exceeds it: ε record of pe-vdn-d, else ε team; or --set "
            "budget_observer=team or agent."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the run (default: runs/NAME-TIME).")
    ] = None,
    buffer: Buffer = None,
    workers: Workers = None,
    world_timeout: WorldTimeout = None,
    checkpoint_every: CheckpointEvery = None,
    devices: Devices = None,
    as_json: Json = False,
) -> None:
    """Train a team and write a run directory: metrics, checkpoints, summary and curve."""
    from pevdn.config import presets
    from pevdn.config.settings import parse_assignments
    from pevdn.privacy import planner
    from pevdn.training.progress import reporter

    settings: dict[str, Any] = {**parse_assignments(assignments or [])}
    if epsilon_budget is not None:
        settings["epsilon_budget"] = epsilon_budget
    config = presets.configure(algorithm, env, steps, seeds, seed, settings, preset)
    options = presets.options_of(preset).replace(
        {
            "buffer": buffer,
            "workers": workers,
            "world_timeout": world_timeout,
            "checkpoint_every": checkpoint_every,
            "devices": devices,
        }
    )
    planner.check_preset(preset, settings, config)
    told = reporter()
    if (note := planner.other_team(preset, settings, config)) is not None:
        told.note(note)
    from pevdn.training.loop import begin  # loads JAX, so after the checks

    show(begin(config, out, told, options), as_json)


def show(run: Any, as_json: bool) -> None:
    """Print the final figures, the curve, and the files."""
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
