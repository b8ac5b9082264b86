"""Atomic and durable file writes, and private, locked directories."""

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
    """Yield a draft path beside `path` that replaces it when the block succeeds.

    The content is on the disk before the rename: a crash leaves the old file or the new one.
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
    """Return where `replacing` writes the new content; a crash may leave this file behind."""
    return path.with_name(f".{path.stem}.draft{path.suffix}")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the whole file, or leave it unchanged."""
    with replacing(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def append(path: Path, content: str | bytes) -> None:
    """Append to a file; the content is on the disk when this returns."""
    with path.open("ab") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def create(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file that must not exist yet; its mode is set before its content.

    Raises FileExistsError and other OSErrors; an incomplete file is removed.
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
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a text file; none if it does not exist."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def make_private(path: Path) -> None:
    """Create a directory with mode 0700, whatever the umask.

    An existing empty directory gets that mode too. Non-empty directories and existing parents are
    left unchanged.
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
            "a directory that you own with --out."
        ) from None


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory, or raise a PevdnError."""
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
    """Turn an OSError, such as a full disk, into a PevdnError that names the fix."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            started = (path / "config.yaml").exists()
            then = f"continue with `pevdn resume {path}`" if started else "train again"
            raise PevdnError(
                f"no space left on the disk of {path}; free some, then {then}."
            ) from None
        raise PevdnError(f"cannot write to {path}: {problem.strerror or problem}.") from None
