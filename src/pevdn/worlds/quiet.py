"""Keeping simulators quiet, and importing one world of JaxMARL without the others."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(module: str) -> Iterator[None]:
    """Lets one module of JaxMARL be imported without what the packages around it import.

    Those import every world that JaxMARL has, which takes four seconds and none of it is needed.
    Empty ones stand in for them meanwhile; who imports JaxMARL later gets the real ones.
    """
    found = None if "jaxmarl" in sys.modules else importlib.util.find_spec("jaxmarl")
    if found is None or found.origin is None:
        yield
        return
    parts, root = module.split("."), Path(found.origin).parent.parent
    packages = [parts[:depth] for depth in range(1, len(parts))]
    for package in packages:
        stand_in = types.ModuleType(".".join(package))
        stand_in.__path__ = [str(root.joinpath(*package))]
        sys.modules[stand_in.__name__] = stand_in
    try:
        yield
    finally:
        for package in packages:
            del sys.modules[".".join(package)]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drops what is printed, and gives the streams back as they were.

    JaxMARL prints when it is imported, after setting `sys.stdout` to `sys.__stdout__` itself:
    redirecting the first alone would not hold, and a notebook would lose its output for good.
    """
    names = ("stdout", "stderr", "__stdout__", "__stderr__")
    streams = {name: getattr(sys, name) for name in names}
    for name in names:
        setattr(sys, name, io.StringIO())
    try:
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Sends what is printed to standard error, also by libraries in C and by other programs."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
