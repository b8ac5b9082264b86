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

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pevdn.config import settings as configuration
from pevdn.config.settings import Config
from pevdn.errors import PevdnError, UsageError


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


def to_json(document: Any, indent: int | None = None) -> str:
    """Strict JSON, which has no infinity: it becomes the text "inf"."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    return json.dumps(plain(document), indent=indent)


def from_json(text: str) -> Any:
    """The way back."""

    def numbers(found: dict[str, Any]) -> dict[str, Any]:
        return {k: float(v) if v in ("inf", "-inf", "nan") else v for k, v in found.items()}

    return json.loads(text, object_hook=numbers)


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


def make_private(path: Path) -> None:
    """Make a directory that its owner alone can enter: mode 0700, whatever the umask.

    A directory that exists and is empty gets that mode as well. One that holds something, and
    parents that exist, are left as they are.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if any(file.name != ".lock" for file in path.iterdir()):
            return
    try:
        path.chmod(0o700)
    except PermissionError as problem:
        raise PevdnError(
            f"{path} cannot be closed to other users (chmod 700: {problem.strerror}); choose "
            "a directory of your own with --out."
        ) from None


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """One process per run."""
    file: IO[str] = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise PevdnError(f"{path} is being trained by another process; wait for it.") from None
    try:
        yield
    finally:
        file.close()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full disk is one sentence; what was saved before stays as it was."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            begun = (path / "config.yaml").exists()
            then = f"continue with `pevdn resume {path}`" if begun else "train again"
            raise PevdnError(
                f"no space left on the disk of {path}; free some, then {then}."
            ) from None
        raise PevdnError(f"cannot write to {path}: {problem.strerror or problem}.") from None


def keep_lines(path: Path, count: int) -> None:
    """Drop what was written after the checkpoint; it will be written again, the same."""
    lines = whole_lines(path)
    if len(lines) < count:
        raise PevdnError(
            f"{path} has {len(lines)} lines, but the checkpoint was made after {count}; "
            "it was cut short, and the run cannot go on from it."
        )
    write_whole(path, "".join(lines[:count]))


def whole_lines(path: Path) -> list[str]:
    """Without a last one that is still being written, or was when the process was killed."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing."""
    draft = path.with_name(path.name + ".new")
    try:
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
