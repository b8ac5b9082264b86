"""Errors that users can act on: each message is one sentence with the value and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PevdnError(Exception):
    """A failure at run time; the command line exits with 1."""


class UsageError(PevdnError):
    """An argument that does not exist or is out of range; the command line exits with 2."""


class WorldFault(PevdnError):
    """An external world failed, or returned invalid values."""


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> UsageError:
    """Return an error such as `unknown setting 'gama'; did you mean 'gamma'?`"""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"; did you mean '{near[0]}'?" if near else f"; choose one of: {', '.join(names)}."
    return UsageError(f"unknown {kind} '{name}'{guess}{' ' + hint if hint else ''}")


class Interrupted(PevdnError):
    """A requested stop; everything is saved, and the command line exits with 130."""
