"""Runtime options of `pevdn train`, `resume`, `world` and `team up`."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Runtime options (how the run is computed, not its results)"

Buffer = Annotated[
    str | None,
    typer.Option(
        help="Memory of the replay buffers: device, or host for large teams.", rich_help_panel=PANEL
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(help="Copies of an external world (default: by cores).", rich_help_panel=PANEL),
]
WorldTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds for a step or a reset of an external world (default: 120).",
        rich_help_panel=PANEL,
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(
        help="Environment steps between checkpoints (default: 50,000).", rich_help_panel=PANEL
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="N|all",
        help="GPUs or CPU devices that share the seeds (default: 1).",
        rich_help_panel=PANEL,
    ),
]
