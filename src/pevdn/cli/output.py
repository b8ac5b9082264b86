"""Output on standard output: tables, or one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def print_json(document: Any) -> None:
    from pevdn.storage.strict_json import to_json

    typer.echo(to_json(document, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    first, *others = columns
    name = Column(first, no_wrap=True)  # names are copied, so never wrap them
    table = Table(name, *others, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(soft_wrap=False, highlight=False).print(table)
