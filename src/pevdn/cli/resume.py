"""`pevdn resume`: go on where a run stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json
from pevdn.cli.train import show


def main(
    run: Annotated[Path, typer.Argument(help="The directory of the run.")],
    new_noise: Annotated[
        bool,
        typer.Option(
            "--new-noise", help="Draw new random numbers, and count what a kill lost as spent."
        ),
    ] = False,
    devices: Annotated[
        str, typer.Option(metavar="N|all", help="GPUs (or CPU devices) that share the seeds.")
    ] = "1",
    as_json: Json = False,
) -> None:
    """Continue a run that was stopped or killed; it ends as if it never had been."""
    from pevdn.training import loop as runs
    from pevdn.training.progress import observer

    show(runs.resume(run, observer(), new_noise=new_noise, devices=devices), as_json)
