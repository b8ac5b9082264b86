"""Files that are complete or absent, and directories that only their owner can enter."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pevdn.errors import PevdnError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path`, with its suffix, that replaces it once the block has succeeded.

    The content is on the disk before the name is: a crash leaves the old file or the new one.
    """
    draft = draft_of(path)
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def draft_of(path: Path) -> Path:
    """Where the next content of a file is written; a crash may leave it behind."""
    return path.with_name(f".{path.stem}.draft{path.suffix}")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the whole file, or leave it as it was."""
    with replacing(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def append(path: Path, content: str | bytes) -> None:
    """Add to the end of a file; it is on the disk when this returns."""
    with path.open("ab") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def create(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file that must not exist yet; it has its mode before it has content.

    Raises FileExistsError and other OSErrors; a file that cannot be completed is removed.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names of new files in a directory survive a crash."""
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def whole_lines(path: Path) -> list[str]:
    """The lines of a text file, without an incomplete last one; none if there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def make_private(path: Path) -> None:
    """Create a directory with mode 0700, whatever the umask.

    An existing empty directory gets that mode as well. One that holds something, and existing
    parents, are left as they are.
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
    """Allow one process per directory."""
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
    """Turn a full or read-only disk into one sentence; what was saved before stays as it was."""
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
