"""`pevdn check-env`: check that a world can be trained in."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    env: Annotated[str, typer.Argument(help="World id, such as pettingzoo:own_world.")],
    episodes: Annotated[int, typer.Option(help="Episodes to play.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the first episode.")] = 0,
    as_json: Json = False,
) -> None:
    """Check a world by playing it with random actions; exit with 1 if a team cannot train in it."""
    from pevdn.worlds.checks import check_env
    from pevdn.worlds.quiet import stdout_to_stderr

    with stdout_to_stderr():
        report = check_env(env, episodes=episodes, seed=seed)
    if as_json:
        print_json({**dataclasses.asdict(report), "ok": report.ok})
    else:
        typer.echo(f"{report.env}: a team {'can' if report.ok else 'cannot'} train here")
        rows = [[c.check, c.result, c.sentence] for c in report.checks]
        print_table(["check", "result", "details"], rows)
    raise typer.Exit(0 if report.ok else 1)
