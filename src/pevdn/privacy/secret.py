"""Keep 32 secret bytes in a file that only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from pevdn.errors import UsageError
from pevdn.storage import files

FILE = "secret"
SIZE = 32


def load_or_create(path: Path) -> bytes:
    """Return the bytes in the file; create it from the operating system's generator if absent.

    A new secret is on the disk before this returns. A file that other users may read or change, or
    that is truncated, is refused.
    """
    try:
        return _create(path)
    except FileExistsError:
        return load(path)
    except OSError as problem:
        raise UsageError(
            f"the secret {path} cannot be created ({problem.strerror}); choose a directory that "
            "you may write to."
        ) from None


def _create(path: Path) -> bytes:
    key = os.urandom(SIZE)
    files.create(path, key, 0o600)
    return key


def load(path: Path) -> bytes:
    """Return the bytes in an existing file, or raise a UsageError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777  # of the open file, not of its name
            key = file.read(SIZE + 1)
    except OSError as problem:
        raise UsageError(
            f"the secret {path} cannot be read ({problem.strerror}); restore it, or run as its "
            "owner."
        ) from None
    if mode & 0o077:
        raise UsageError(
            f"the secret {path} is accessible to other users (mode {mode:o}), who may know it; "
            f"run `chmod 600 {path}` if they do not, or start a new training."
        )
    if len(key) != SIZE:
        raise UsageError(
            f"the secret {path} has {'more than ' if len(key) > SIZE else ''}"
            f"{min(len(key), SIZE)} bytes instead of {SIZE}; restore it, or remove it if training "
            "has not started."
        )
    return key
