"""The README.md in every directory that pevdn writes: what each file holds, and who may see it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pevdn.storage.files import write_atomically

FILE = "README.md"

Row = tuple[str, str, str]  # file, content, whether it may be published


def leave(folder: Path, text: str) -> None:
    """Write README.md unless there is one."""
    if not (folder / FILE).exists():
        write_atomically(folder / FILE, text)


def ledger_rows(private: bool, digests: str) -> list[Row]:
    """Return the row of the ledger, which only private runs have."""
    row = (
        "`ledger.jsonl`, `ledger.head`",
        f"the privacy spent, and digests of {digests}",
        "no: a digest confirms a guess",
    )
    return [row] if private else []


def table(rows: Iterable[Row]) -> str:
    head = "| file | content | may be published? |\n|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(*parts: str) -> str:
    """Join paragraphs; empty ones are left out."""
    return "\n\n".join(filter(None, parts)) + "\n"
