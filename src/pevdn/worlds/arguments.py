"""Arguments in the id of a world: `pettingzoo:mpe2.simple_spread_v3?N=4&local_ratio=0.2`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pevdn.errors import UsageError, unknown

WORDS = {"true": True, "false": False, "none": None}


def parse(query: str) -> dict[str, str]:
    """Return the arguments of a query such as `N=4&local_ratio=0.2` by name."""
    arguments = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"'{part}' in the id of a world is not of the form ARGUMENT=VALUE")
        arguments[name] = value
    return arguments


def checked(owner: str, texts: Mapping[str, str], factories: Iterable[Callable[..., Any]]) -> Any:
    """Return the arguments of `owner` as values; their names must be in `signature_of`."""
    known = signature_of(factories)
    if known is not None:
        for name in texts:
            if name not in known:
                raise unknown(f"argument of {owner}", name, known or ["(it takes none)"])
    return {name: _value(text, (known or {}).get(name)) for name, text in texts.items()}


def signature_of(factories: Iterable[Callable[..., Any]]) -> dict[str, Any] | None:
    """Return names and defaults of the parameters of the first factory without `**kwargs`."""
    for factory in factories:
        try:
            parameters = inspect.signature(factory).parameters.values()
        except (TypeError, ValueError):
            continue
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return {p.name: p.default for p in parameters if p.kind is not p.VAR_POSITIONAL}
    return None


def _value(text: str, default: Any) -> Any:
    """Parse a number, boolean or None; keep the text if that fails or the default is text."""
    if isinstance(default, str):
        return text
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
