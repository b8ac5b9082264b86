"""README.md files that say what each file of a directory holds and whether it may be published."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pevdn.storage.files import write_atomically

FILE = "README.md"

Row = tuple[str, str, str]  # file, what it holds, whether it may be published


def leave(path: Path, text: str) -> None:
    """Write README.md into a directory unless there is one."""
    if not (path / FILE).exists():
        write_atomically(path / FILE, text)


def table(rows: Iterable[Row]) -> str:
    head = "| file | holds | may be published? |\n|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(*parts: str) -> str:
    """Join paragraphs; empty ones are left out."""
    return "\n\n".join(filter(None, parts)) + "\n"


def ledger_row(holds: str) -> Row:
    """Return the row of a ledger, which also holds digests of something."""
    return (
        "`ledger.jsonl`, `ledger.head`",
        f"what was spent, and {holds}",
        "no: a digest confirms a guess",
    )
