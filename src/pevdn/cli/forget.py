"""`pevdn forget`: delete the private state of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json


def main(
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    as_json: Json = False,
) -> None:
    """Delete the stored episodes, optimiser state and random keys of a finished run."""
    from pevdn.training.forget import forget

    result = forget(run)
    if as_json:
        print_json({**result._asdict(), "run": str(result.run)})
        return
    typer.echo(
        f"{run} keeps {result.bytes_after:,} of {result.bytes_before:,} bytes: no stored episode, "
        "optimiser state, random key or secret. It can be evaluated, replayed, exported and "
        "published, but not trained further. Deleted blocks may remain on the disk and in backups."
    )
    if result.seed_kept:
        typer.echo(
            "The seed in config.yaml is kept: it determines noise, samples and simulated episodes."
        )
