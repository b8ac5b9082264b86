"""Keep simulators quiet, and import one JaxMARL world without the others."""

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
def isolated_import(module: str) -> Iterator[None]:
    """Import one JaxMARL module without running its parent packages.

    The parents import every JaxMARL world, which takes four seconds. Empty packages stand in for
    them meanwhile; a later `import jaxmarl` gets the real ones.
    """
    spec = None if "jaxmarl" in sys.modules else importlib.util.find_spec("jaxmarl")
    if spec is None or spec.origin is None:
        yield
        return
    parts, root = module.split("."), Path(spec.origin).parent.parent
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
    """Discard printed output, and restore the streams afterwards.

    JaxMARL prints at import after setting `sys.stdout` to `sys.__stdout__`: redirecting
    `sys.stdout` alone would not hold, and a notebook would lose its output.
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
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error, also that of C libraries and child processes."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
