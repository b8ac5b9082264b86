"""The directory of a run: everything about it, and nothing ever half written.

It has mode 0700, because checkpoints hold raw training episodes; `pevdn publish` copies what may
be handed out.

README.md        what each file is, and what may be published
config.yaml      what was asked for
world.json       what agents see and do, if the world is outside of JAX or was an object
metrics.jsonl    one line per seed and evaluation, written as it goes
ledger.jsonl     with DP: every update, before it is made and after (and ledger.head)
secret           with randomness=os: 32 bytes that all random numbers follow from, mode 0600
checkpoints/     the newest states; `pevdn resume` goes on from there
summary.json     the final figures, once finished
curve.png        the win rate as a picture
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pevdn.config import experiment as configuration
from pevdn.config.experiment import Config
from pevdn.errors import PevdnError, UsageError
from pevdn.storage.files import whole_lines, write_atomically
from pevdn.storage.strict_json import from_json


@dataclass(frozen=True)
class Run:
    """The directory of a run, finished or not."""

    path: Path

    @property
    def config(self) -> Config:
        return configuration.load(self.path / "config.yaml")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl written so far."""
        return [from_json(line) for line in whole_lines(self.path / "metrics.jsonl")]

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").exists()

    @property
    def summary(self) -> dict[str, Any]:
        if not self.finished:
            raise UsageError(
                f"{self.path} is not finished; continue with `pevdn resume {self.path}`."
            )
        path = self.path / "summary.json"
        try:
            found: dict[str, Any] = from_json(path.read_text())
        except ValueError:
            raise PevdnError(
                f"{path} is damaged; delete it, and `pevdn resume {self.path}` writes it again."
            ) from None
        return found


def fresh_directory(config: Config) -> Path:
    name = f"{config.algorithm}-{config.env.replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def refuse_taken(path: Path) -> None:
    """A new run never touches a directory that holds something."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; choose another directory with --out.")
    if (path / "config.yaml").exists():
        raise UsageError(
            f"{path} holds another run; choose another --out, or continue that one with "
            f"`pevdn resume {path}`."
        )
    if path.exists() and any(file.name != ".lock" for file in path.iterdir()):
        raise UsageError(f"{path} is not empty; choose another --out.")


def keep_lines(path: Path, count: int) -> None:
    """Drop what was written after the checkpoint; it will be written again, the same."""
    lines = whole_lines(path)
    if len(lines) < count:
        raise PevdnError(
            f"{path} has {len(lines)} lines, but the checkpoint was made after {count}; "
            "it was cut short, and the run cannot go on from it."
        )
    write_atomically(path, "".join(lines[:count]))
