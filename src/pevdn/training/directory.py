"""The directory of a run. Files are complete or absent.

It has mode 0700, because checkpoints contain raw training episodes; `pevdn publish` copies what may
be handed out.

README.md        what each file holds, and whether it may be published
config.yaml      configuration and runtime options
world.json       sizes of observations and actions, for external worlds and objects
metrics.jsonl    one line per seed and evaluation, written while training
ledger.jsonl     with DP: every update, before and after it is made (and ledger.head)
secret           with randomness=os: 32 bytes that determine all random numbers, mode 0600
checkpoints/     the newest states, for `pevdn resume`
summary.json     the final figures, once finished
curve.png        the win rate over training
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pevdn.config.experiment import Config, load, load_with_options
from pevdn.config.runtime import RuntimeOptions
from pevdn.errors import PevdnError, UsageError
from pevdn.storage.strict_json import from_json
from pevdn.training import metrics


@dataclass(frozen=True)
class Run:
    """The directory of a run, finished or not."""

    path: Path

    @property
    def config(self) -> Config:
        return load(self.path / "config.yaml")

    @property
    def options(self) -> RuntimeOptions:
        """The runtime options that the run was started with."""
        return load_with_options(self.path / "config.yaml")[1]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl written so far."""
        return metrics.read(self.path)

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
            document: dict[str, Any] = from_json(path.read_text())
        except ValueError:
            raise PevdnError(
                f"{path} is damaged; delete it, and `pevdn resume {self.path}` writes it again."
            ) from None
        if "budget_view" in document:  # its name in earlier versions
            document["budget_observer"] = document.pop("budget_view")
        return document


def fresh_directory(config: Config) -> Path:
    """Return a new name under runs/."""
    name = f"{config.algorithm}-{config.env.replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def refuse_taken(path: Path) -> None:
    """Refuse to start a run in a directory that is not empty."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; choose another directory with --out.")
    if (path / "config.yaml").exists():
        raise UsageError(
            f"{path} holds another run; choose another --out, or continue that one with "
            f"`pevdn resume {path}`."
        )
    if path.exists() and any(file.name != ".lock" for file in path.iterdir()):
        raise UsageError(f"{path} is not empty; choose another --out.")
