"""A file of JSON lines, each with a checksum over itself and the checksum of the line before it.

An edited, reordered or removed line breaks the chain. Truncation at the end does not: the ledger
keeps the last checksum in a second file, the journal starts over at every snapshot.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pevdn.storage.files import append

Line = dict[str, Any]


class BrokenChain(Exception):
    """Line `number` of a file does not match its checksum."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number}")
        self.number = number


def checksum(before: str, line: Mapping[str, Any]) -> str:
    """Return SHA-256 over the checksum before a line and the line without its own."""
    text = json.dumps({k: v for k, v in line.items() if k != "check"}, sort_keys=True)
    return hashlib.sha256((before + text).encode()).hexdigest()


def extend(path: Path, before: str, line: Mapping[str, Any]) -> Line:
    """Append a line, on the disk when this returns, and return it with its checksum."""
    sealed = {**line, "check": checksum(before, line)}
    append(path, json.dumps(sealed) + "\n")
    return sealed


def read(path: Path) -> list[Line]:
    """Return all complete lines, verified. An incomplete last line is ignored."""
    lines: list[Line] = []
    before = ""
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
            if line["check"] != checksum(before, line):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BrokenChain(number) from None
        before = line["check"]
        lines.append(line)
    return lines


def cut_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line, left by a process that was killed."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
