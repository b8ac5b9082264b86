"""`pevdn reproduce`: the paper's experiment, and the studies it announces."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    seeds: Annotated[
        int | None, typer.Option(help="Seeds of each arm (default: 8, quick 1).")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Environment steps per seed (default: 400,000, quick few).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of all runs (default: runs/reproduce).")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Ten minutes on two cores: less of everything.")
    ] = False,
    study: Annotated[
        str | None, typer.Option(help="Instead of Figure 1: privacy, precision or agents.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Arms that train at a time, each in a process of its own.")
    ] = 1,
    devices: Annotated[
        str, typer.Option(metavar="N|all", help="GPUs (or CPU devices) that share the seeds.")
    ] = "1",
    as_json: Json = False,
) -> None:
    """Run the paper's experiment: Figure 1, a table, and where ours differs. Continues itself."""
    from pevdn.reproduction import reproduce
    from pevdn.training.progress import observer

    document = reproduce(
        seeds=seeds,
        steps=steps,
        out=out,
        quick=quick,
        study=study,
        jobs=jobs,
        devices=devices,
        observer=observer(),
    )
    if as_json:
        print_json(document)
    else:
        _show(document)


def _show(document: dict[str, Any]) -> None:
    from pevdn.reproduction import text

    print_table(
        ["arm", "model", "win rate [95 %]", "paper", "of VDN", "ε team", "ε agent*"],
        [
            [
                row["arm"],
                row["model"],
                text.rate(row, "win_rate", ".2f"),
                f"{row['paper']['win_rate']:.2f}" if "paper" in row else text.NONE,
                text.rate(row, "share_of_vdn", ".0%").partition(" ")[0],
                text.epsilon(row, "epsilon_team"),
                text.epsilon(row, "epsilon_agent"),
            ]
            for row in document["rows"]
        ],
    )
    if any("epsilon_team" in row for row in document["rows"]):
        typer.echo("* conditional; only ε team is proven (docs/privacy.md)")
    for name, reason in document["refused"].items():
        typer.echo(textwrap.fill(f"{name}: {reason}", 80))
    for sentence in document["words"]:
        typer.echo(textwrap.fill(sentence, 80, initial_indent="- ", subsequent_indent="  "))
    typer.echo("\n" + "\n".join(document["files"]))
