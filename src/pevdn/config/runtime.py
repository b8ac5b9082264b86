"""Runtime options: how a run is computed, not what it computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RuntimeOptions:
    buffer: str = "device"
    workers: int = 0
    world_timeout: float = 120.0
    checkpoint_every: int = 50_000
    devices: int | str = 1
