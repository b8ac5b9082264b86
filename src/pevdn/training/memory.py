"""Refuse replay buffers that do not fit into memory, before the machine swaps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from pevdn.errors import PevdnError, UsageError

GIB = 2**30
SHARE = 0.8  # of the memory that replay buffers may take


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_device_buffers(simulation: Any, devices: int) -> None:
    """Refuse dense buffers that exceed the memory; packed ones are watched as they grow."""
    size = simulation.config.settings.buffer_size
    shapes = jax.tree.leaves(simulation.like().replays)
    needed = sum(x.size * x.dtype.itemsize for x in shapes)
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    room = limit * devices if limit else machine_memory()
    if needed > SHARE * room:
        raise UsageError(
            f"replay buffers of buffer_size={size} episodes need {needed / GIB:.1f} GiB, but "
            f"{device.platform} has {room / GIB:.1f} GiB; set buffer_size to "
            f"{int(size * 0.6 * room / needed)} or less, train fewer seeds at a time, or pack them "
            "into host memory with --buffer host."
        )


def outgrown(held: int, stored: int, buffer_size: int) -> PevdnError | None:
    """Return an error if packed buffers that `held` bytes leave too little host memory."""
    room = machine_memory()
    if held <= SHARE * room:
        return None
    return PevdnError(
        f"replay buffers in host memory hold {held / GIB:.1f} GiB after {stored} of buffer_size="
        f"{buffer_size} episodes, and the machine has {room / GIB:.1f} GiB; everything is saved: "
        "train anew with a smaller buffer_size or fewer seeds at a time, or resume on a larger "
        "machine."
    )


@contextmanager
def device_memory_errors(path: Path) -> Iterator[None]:
    """Turn a full GPU into one sentence; earlier checkpoints stay as they are."""
    try:
        yield
    except RuntimeError as problem:  # the base of JAX's own
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        raise PevdnError(
            f"the memory of the device is full; free some and continue with `pevdn resume {path}`, "
            "or train with fewer --seeds, a smaller buffer_size, or --buffer host."
        ) from None
