"""metrics.jsonl: one line per seed and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pevdn.errors import PevdnError
from pevdn.storage.files import append, whole_lines, write_atomically
from pevdn.storage.strict_json import from_json, to_json

FILE = "metrics.jsonl"

Line = dict[str, Any]


def read(folder: Path) -> list[Line]:
    """Return the lines written so far, without an incomplete last one."""
    return [from_json(line) for line in whole_lines(folder / FILE)]


def write(folder: Path, lines: Sequence[Line]) -> None:
    """Append lines; they are on the disk when this returns."""
    append(folder / FILE, "".join(to_json(line) + "\n" for line in lines))


def cut(folder: Path, count: int) -> None:
    """Drop the lines written after a checkpoint: the resumed run writes the same lines again."""
    lines = whole_lines(folder / FILE)
    if len(lines) < count:
        raise PevdnError(
            f"{folder / FILE} has {len(lines)} lines, but the checkpoint was made after {count}; "
            "it was cut short, and the run cannot go on from it."
        )
    write_atomically(folder / FILE, "".join(lines[:count]))


def by_seed(lines: Sequence[Line]) -> dict[int, list[Line]]:
    """Group lines by seed, in the order of their first lines."""
    groups: dict[int, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["seed"], []).append(line)
    return groups


def mean_of_seeds(lines: Sequence[Line]) -> dict[str, float]:
    """Return the means over the lines of one evaluation; of ε, the largest value."""
    means = {}
    for name in lines[0]:
        values = [line[name] for line in lines if line[name] is not None]
        if values:
            is_epsilon = name.startswith("epsilon")
            means[name] = max(values) if is_epsilon else sum(values) / len(values)
    return means
