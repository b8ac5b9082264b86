"""Strict JSON, which has no infinity: write infinities and NaN as "inf", "-inf", "nan"."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(document: Any, indent: int | None = None) -> str:
    """Return the document as JSON that any parser accepts."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    return json.dumps(plain(document), indent=indent)


def from_json(text: str) -> Any:
    """Parse JSON; the values "inf", "-inf" and "nan" of an object become floats again."""

    def numbers(pairs: dict[str, Any]) -> dict[str, Any]:
        return {k: float(v) if v in ("inf", "-inf", "nan") else v for k, v in pairs.items()}

    return json.loads(text, object_hook=numbers)
