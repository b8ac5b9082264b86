"""`pevdn reproduce`: rerun the paper's experiment and the studies that it announces."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    seeds: Annotated[
        int | None, typer.Option(help="Seeds per arm (default: 8; with --quick 1).")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Environment steps per seed (default: 400,000; with --quick fewer)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the runs (default: runs/reproduce).")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A reduced experiment: ten minutes on two cores.")
    ] = False,
    study: Annotated[
        str | None, typer.Option(help="A study instead of Figure 1: privacy, precision or agents.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Arms trained at the same time, each in its own process.")
    ] = 1,
    devices: Annotated[
        str, typer.Option(metavar="N|all", help="GPUs or CPU devices that share the seeds.")
    ] = "1",
    as_json: Json = False,
) -> None:
    """Reproduce Figure 1 of the paper, with a table and the differences; rerun it to continue."""
    from pevdn.reproduction import reproduce
    from pevdn.training.progress import reporter

    document = reproduce(
        seeds=seeds,
        steps=steps,
        out=out,
        quick=quick,
        study=study,
        jobs=jobs,
        devices=devices,
        reporter=reporter(),
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
