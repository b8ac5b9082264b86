"""`pevdn config`: every setting, its default and its meaning."""

from __future__ import annotations

from typing import Annotated

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
    """List all settings that `--set` takes."""
    from pevdn.config import algorithms, presets
    from pevdn.config.settings import setting_fields

    chosen = presets.settings_of(preset, algorithm)
    name = presets.find(preset).algorithm if preset else algorithm
    own = {**algorithms.find(name).defaults, **chosen} if name else {}
    rows = [
        {
            "name": field.name,
            "default": own.get(field.name, field.default),
            "meaning": field.metadata["meaning"],
            "choices": list(field.metadata["choices"]),
        }
        for field in setting_fields().values()
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["setting", "default", "meaning"],
        [[row["name"], row["default"], row["meaning"]] for row in rows],
    )
