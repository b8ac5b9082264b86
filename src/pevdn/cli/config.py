"""`pevdn config`: list the settings and the runtime options."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    algorithm: Annotated[
        str | None, typer.Argument(help="Show the defaults of this algorithm.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Show the values of this preset; `pevdn presets` lists them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the settings (`--set NAME=VALUE`) and the runtime options, with their defaults."""
    from pevdn.config import algorithms, presets
    from pevdn.config.runtime import option_fields
    from pevdn.config.settings import setting_fields

    own = dict(presets.settings_of(preset, algorithm))
    name = presets.find(preset).algorithm if preset else algorithm
    if name:
        own = {**algorithms.find(name).defaults, **own}
    options = presets.find(preset).options if preset else {}
    settings = [_row("setting", field, own) for field in setting_fields().values()]
    runtime = [_row("runtime option", field, options) for field in option_fields().values()]
    if as_json:
        print_json(settings + runtime)
        return
    _print(settings)
    for row in runtime:
        row["name"] = f"--{row['name'].replace('_', '-')}"
    _print(runtime)
    typer.echo(
        "Settings define the experiment: pevdn train … --set gamma=0.95. Runtime options change "
        "how it is\ncomputed, not its results: pevdn train … --buffer host."
    )


def _row(kind: str, field: Any, values: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": field.name,
        "default": values.get(field.name, field.default),
        "meaning": field.metadata["meaning"],
        "choices": list(field.metadata["choices"]),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    columns = ("name", "default", "meaning")
    cells = [[row[name] for name in columns] for row in rows]
    print_table([rows[0]["kind"], *columns[1:]], cells)
