"""Errors a person can act on: each message is one sentence that names the value and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PevdnError(Exception):
    """Something failed while running; the command line exits with 1."""


class UsageError(PevdnError):
    """The caller asked for something that does not exist or is out of range; exits with 2."""


class WorldFault(PevdnError):
    """A world outside of JAX failed, or gave what no world may give."""


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> UsageError:
    """`unknown setting 'gama'; did you mean 'gamma'?`"""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"; did you mean '{near[0]}'?" if near else f"; choose one of: {', '.join(names)}."
    return UsageError(f"unknown {kind} '{name}'{guess}{' ' + hint if hint else ''}")


class Interrupted(PevdnError):
    """Stopped on request; everything is saved."""
