"""`pevdn resume`: continue a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.options import CheckpointEvery, Devices, Workers, WorldTimeout
from pevdn.cli.output import Json
from pevdn.cli.train import show


def main(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    new_noise: Annotated[
        bool,
        typer.Option("--new-noise", help="Draw new random numbers; lost updates count as spent."),
    ] = False,
    workers: Workers = None,
    world_timeout: WorldTimeout = None,
    checkpoint_every: CheckpointEvery = None,
    devices: Devices = None,
    as_json: Json = False,
) -> None:
    """Continue a stopped or killed run; the result matches an uninterrupted run.

    Runtime options default to those that the run was started with.
    """
    from pevdn.training.directory import Run
    from pevdn.training.progress import reporter

    Run(run).config  # noqa: B018  (check that it is a run before loading JAX)
    from pevdn.training.loop import resume

    finished = resume(
        run,
        reporter(),
        new_noise=new_noise,
        workers=workers,
        world_timeout=world_timeout,
        checkpoint_every=checkpoint_every,
        devices=devices,
    )
    show(finished, as_json)
