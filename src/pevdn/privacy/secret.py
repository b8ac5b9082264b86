"""32 secret bytes in a file that only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from pevdn.errors import UsageError
from pevdn.storage import files

FILE = "secret"
SIZE = 32


def load_or_create(path: Path) -> bytes:
    """The bytes in the file; if there is none, new ones from the operating system, on the disk.

    Nothing is drawn from a new secret before it would survive a crash. A file that anybody else
    may read or change, or that was cut short, is refused.
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
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777  # of what is read, not of its name
            key = file.read(SIZE + 1)
    except OSError as problem:
        raise UsageError(
            f"the secret {path} cannot be read ({problem.strerror}); restore it, or run as its "
            "owner."
        ) from None
    if mode & 0o077:
        raise UsageError(
            f"the secret {path} is open to others than its owner (mode {mode:o}) and may be "
            f"known to them; run `chmod 600 {path}` if it is not, or else start a new training."
        )
    if len(key) != SIZE:
        raise UsageError(
            f"the secret {path} has {'more than ' if len(key) > SIZE else ''}"
            f"{min(len(key), SIZE)} bytes and not {SIZE}; restore it, or remove it if training has "
            "not begun."
        )
    return key
