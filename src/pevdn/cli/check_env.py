"""`pevdn check-env`: what is wrong with a world."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    env: Annotated[str, typer.Argument(help="A world, such as pettingzoo:own_world.")],
    episodes: Annotated[int, typer.Option(help="Episodes to play.")] = 5,
    seed: Annotated[int, typer.Option(help="Where the seeds of the episodes start.")] = 0,
    as_json: Json = False,
) -> None:
    """Play a world with random actions and say what is wrong with it; exits with 1 on an error."""
    from pevdn.worlds.checks import check_env
    from pevdn.worlds.quiet import stdout_to_stderr

    with stdout_to_stderr():
        found = check_env(env, episodes=episodes, seed=seed)
    if as_json:
        print_json({**dataclasses.asdict(found), "ok": found.ok})
    else:
        typer.echo(f"{found.env}: a team {'can' if found.ok else 'cannot'} train here")
        rows = [[c.check, c.result, c.sentence] for c in found.checks]
        print_table(["check", "result", "what was seen"], rows)
    raise typer.Exit(0 if found.ok else 1)
