"""Runtime options: how a run is computed, not what it computes.

They are not part of a run's fingerprint: other options give the same metrics (with buffer=host, up
to rounding). `config.yaml` holds them under `runtime`, apart from `settings`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pevdn.config.settings import checked, setting
from pevdn.errors import UsageError, unknown


@dataclass(frozen=True)
class RuntimeOptions:
    """Where and how a run is computed."""

    buffer: str = setting(
        "device",
        "memory of the replay buffers; host: packed, in main memory, for large teams",
        choices=("device", "host"),
    )
    workers: int = setting(
        0,
        "copies of an external world; 0: one per parallel episode, at most 4 per core",
        0,
        1024,
    )
    world_timeout: float = setting(
        120.0, "seconds that an external world may take for a step or a reset", 0.01
    )
    checkpoint_every: int = setting(50_000, "environment steps between checkpoints", 1)
    devices: int | str = setting(1, "GPUs or CPU devices that share the seeds; a number or all")

    def replace(self, values: Mapping[str, Any]) -> RuntimeOptions:
        """Return these options with checked new values, which may be text; None changes nothing."""
        fields = option_fields()
        changes: dict[str, Any] = {}
        for name, value in values.items():
            if name not in fields:
                raise unknown("runtime option", name, fields)
            if value is not None:
                check = _checked_devices if name == "devices" else checked
                changes[name] = check(fields[name], value)
        return dataclasses.replace(self, **changes)


def option_fields() -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(RuntimeOptions)}


def _checked_devices(field: dataclasses.Field[Any], value: Any) -> int | str:
    text = str(value)
    if text == "all":
        return text
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(
            f"{field.name} is '{value}', but must be 'all' or a positive whole number."
        )
    return int(text)
