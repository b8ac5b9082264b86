"""Arguments in the id of a world: `pettingzoo:mpe2.simple_spread_v3?N=4&local_ratio=0.2`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pevdn.errors import UsageError, unknown

WORDS = {"true": True, "false": False, "none": None}


def parse(query: str) -> dict[str, str]:
    """`N=4&local_ratio=0.2` by name."""
    found = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"'{part}' in the id of a world is not of the form ARGUMENT=VALUE")
        found[name] = value
    return found


def checked(owner: str, given: Mapping[str, str], makers: Iterable[Callable[..., Any]]) -> Any:
    """The arguments of `owner` as values, known to the first maker that says what it takes."""
    known = signature_of(makers)
    if known is not None:
        for name in given:
            if name not in known:
                raise unknown(f"argument of {owner}", name, known or ["(it takes none)"])
    return {name: _value(text, (known or {}).get(name)) for name, text in given.items()}


def signature_of(makers: Iterable[Callable[..., Any]]) -> dict[str, Any] | None:
    """Names and defaults of the arguments of the first that does not take just anything."""
    for maker in makers:
        try:
            taken = inspect.signature(maker).parameters.values()
        except (TypeError, ValueError):
            continue
        if not any(p.kind is p.VAR_KEYWORD for p in taken):
            return {p.name: p.default for p in taken if p.kind is not p.VAR_POSITIONAL}
    return None


def _value(text: str, default: Any) -> Any:
    """A number, a truth value or nothing if it reads like one, and the default is no text."""
    if isinstance(default, str):
        return text
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
