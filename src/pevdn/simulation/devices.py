"""Spread lanes over the devices of one machine.

Lanes are independent, so every device runs the whole program on its own lanes, and programs contain
no communication between devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pevdn._platform import compiler_options
from pevdn.errors import UsageError


class Lanes:
    """Distributes the lanes of a run evenly; with one device, JAX chooses it."""

    def __init__(self, devices: int | str, seeds: int, note: Callable[[str], None]) -> None:
        self.devices = _count(devices, seeds)
        if devices == "all" and self.devices < jax.local_device_count():
            note(
                f"training on {self.devices} of {jax.local_device_count()} devices, the most that "
                f"can share the seeds ({seeds}) evenly."
            )
        mesh = Mesh(jax.local_devices()[: self.devices], ("lanes",))
        self._spread = NamedSharding(mesh, PartitionSpec("lanes"))
        self._same = NamedSharding(mesh, PartitionSpec())

    def jit(self, f: Callable[..., Any], *like: Any, donate: tuple[int, ...] = ()) -> Any:
        """Return `f`, jitted for arguments like these: arrays of lanes (S, ...), or numbers."""
        how: Any = {"donate_argnums": donate, "compiler_options": compiler_options()}
        if self.devices == 1:
            return jax.jit(f, **how)
        places = jax.tree.map(lambda x: self._spread if x.ndim else self._same, like)
        mapped = jax.shard_map(
            f,
            mesh=self._spread.mesh,
            in_specs=jax.tree.map(lambda place: place.spec, places),
            out_specs=self._spread.spec,
            check_vma=False,
        )
        return jax.jit(mapped, in_shardings=places, out_shardings=self._spread, **how)

    def place(self, tree: Any) -> Any:
        """Put arrays of lanes (S, ...) on the devices."""
        return jax.device_put(tree, self._spread if self.devices > 1 else None)


def _count(devices: int | str, seeds: int) -> int:
    """Return the number of devices to use for `seeds` seeds; `devices` is "all" or a number."""
    there = jax.local_device_count()
    fitting = [n for n in range(1, there + 1) if seeds % n == 0]
    if devices == "all":
        return fitting[-1]
    count = int(devices)
    if count > there:
        raise UsageError(
            f"devices is {count}, but JAX finds {there} here ({jax.default_backend()}); ask for "
            f"{there} or fewer, or for 'all'."
        )
    if count not in fitting:
        raise UsageError(
            f"seeds is {seeds}, which {count} devices cannot share evenly; train a multiple of "
            f"{count} seeds, or set devices to {max(n for n in fitting if n < count)}."
        )
    return count
