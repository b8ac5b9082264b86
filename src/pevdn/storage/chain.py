"""Lines of JSON, each with a checksum over itself and the checksum of the line before it.

An edited, reordered or removed line breaks the chain. A cut at the end does not: the ledger keeps
the last checksum in a second file, the journal starts again at every snapshot.
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
    """Line `number` of a file is not what was written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number}")
        self.number = number


def checksum(before: str, line: Mapping[str, Any]) -> str:
    """SHA-256 over a line, without its own checksum, and the checksum before it."""
    text = json.dumps({k: v for k, v in line.items() if k != "check"}, sort_keys=True)
    return hashlib.sha256((before + text).encode()).hexdigest()


def extend(path: Path, before: str, line: Mapping[str, Any]) -> Line:
    """Append a line to the file, on the disk when this returns; the line with its checksum."""
    sealed = {**line, "check": checksum(before, line)}
    append(path, json.dumps(sealed) + "\n")
    return sealed


def read(path: Path) -> list[Line]:
    """All complete lines, checked. An incomplete last line was never acted upon."""
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
    """Remove a last line that was half written when the process was killed."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
