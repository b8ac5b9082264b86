"""The command line: one module per command; heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

import pevdn
from pevdn.cli import (
    algorithms,
    attack,
    audit,
    budget,
    check_env,
    config,
    evaluate,
    export,
    forget,
    keys,
    ledger,
    party,
    presets,
    publish,
    replay,
    reproduce,
    resume,
    team,
    train,
    world,
    worlds,
)
from pevdn.errors import Interrupted, PevdnError, UsageError

app = typer.Typer(
    name="pevdn",
    help="Train teams of cooperating agents without pooling their data: value decomposition with "
    "secret sharing and differential privacy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = {
    "Train": (train, resume, reproduce),
    "Use a trained team": (evaluate, replay, export, publish, forget),
    "Privacy": (budget, ledger, audit, attack),
    "One process per agent": (keys, party, world),
    "Look up": (algorithms, presets, config, worlds, check_env),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        name = command.__name__.rpartition(".")[2].replace("_", "-")
        app.command(name, rich_help_panel=panel)(command.main)
app.add_typer(team.app, name="team", rich_help_panel="One process per agent")


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"pevdn {pevdn.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def main(arguments: list[str] | None = None) -> Any:
    """Run a command; an expected failure is one sentence and an exit code."""
    try:
        app(arguments, prog_name="pevdn")
    except Interrupted as stopped:
        sys.stderr.write(f"pevdn: {stopped}\n")
        sys.exit(130)
    except UsageError as problem:
        sys.stderr.write(f"pevdn: {problem}\n")
        sys.exit(2)
    except PevdnError as problem:
        sys.stderr.write(f"pevdn: {problem}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("pevdn: stopped.\n")
        sys.exit(130)
