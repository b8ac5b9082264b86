"""`pevdn forget`: delete what a finished run needs for training alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json


def main(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run.")],
    as_json: Json = False,
) -> None:
    """Delete stored episodes, optimiser state and random keys of a finished run, for good."""
    from pevdn.training.forget import forget

    done = forget(run)
    if as_json:
        print_json({**done._asdict(), "run": str(done.run)})
        return
    typer.echo(
        f"{run} keeps {done.bytes_after:,} of {done.bytes_before:,} bytes: no stored episode, "
        "optimiser state, random key or secret. It can be evaluated, replayed, exported and "
        "published, but not trained further. Deleted blocks may remain on the disk and in backups."
    )
    if done.seed_kept:
        typer.echo(
            "The seed in config.yaml is kept: noise and samples, and episodes of a simulator, can "
            "be computed from it again."
        )
