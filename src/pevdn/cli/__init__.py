"""The command line: one file a command, nothing heavy imported until a command runs."""

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
from pevdn.errors import PevdnError, UsageError

app = typer.Typer(
    name="pevdn",
    help="Train a team of cooperating agents without any agent sharing what it saw or did.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = (
    *(train, resume, reproduce, evaluate, export, publish, forget, replay, attack, audit, budget),
    *(ledger, keys, party, world, presets, worlds, check_env, algorithms, config),
)
for command in COMMANDS:
    app.command(command.__name__.rpartition(".")[2].replace("_", "-"))(command.main)
app.add_typer(team.app, name="team")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pevdn {pevdn.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def main(arguments: list[str] | None = None) -> Any:
    """Run a command; every expected failure is one sentence and an exit code."""
    from pevdn.errors import Interrupted

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
