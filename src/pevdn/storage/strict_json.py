"""Strict JSON, which has no infinity: infinities and NaN become the texts "inf", "-inf", "nan"."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(document: Any, indent: int | None = None) -> str:
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
    def numbers(found: dict[str, Any]) -> dict[str, Any]:
        return {k: float(v) if v in ("inf", "-inf", "nan") else v for k, v in found.items()}

    return json.loads(text, object_hook=numbers)
