"""Process-wide settings of JAX and XLA, and workarounds for their bugs."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pevdn.errors import PevdnError

SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler"
LEVEL = "xla_backend_optimization_level"
NOISY = ("0.10.0", "0.10.1")  # jaxlib versions that log false alarms (openxla issue 44565)
MISCOMPILING = ("0.10.2",)  # jaxlib versions with wrong results on the CPU (jax issue 39103)


def guard_against_deadlock() -> None:
    """Disable the XLA scheduler that deadlocks on machines with few cores.

    XLA reads its flags when JAX first uses a device, so this runs when `pevdn` is imported. Flags
    that the user has set are kept, this one included.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if SCHEDULER in flags:
        return
    os.environ["XLA_FLAGS"] = f"{flags} {SCHEDULER}=false".strip()
    if _jax_has_started():
        warnings.warn(
            "JAX was already running when pevdn was imported, so pevdn could not set "
            f"XLA_FLAGS={SCHEDULER}=false, without which training can hang on a CPU with few "
            "cores; import pevdn before the first use of JAX.",
            stacklevel=3,
        )


def use_one_thread_on_few_cores() -> None:
    """Keep XLA from splitting small products between two cores, which often share one.

    XLA reads NPROC when JAX first uses a device. On the machine of docs/performance.md training is
    1.1 to 1.4 × as fast with one thread as with two. A value set by the user is kept.
    """
    if (os.cpu_count() or 1) <= 2:
        os.environ.setdefault("NPROC", "1")


def silence_false_alarms() -> None:
    """Keep XLA from logging an error for every cached program that it loads on some CPUs.

    These versions mistake compiler preferences for CPU features; the loaded program is correct. A
    level set by the user is kept.
    """
    with suppress(PackageNotFoundError):
        if version("jaxlib") in NOISY:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def compiler_options() -> dict[str, str | bool | int | float]:
    """Return the compiler options of our programs, unless XLA_FLAGS sets them.

    On the CPU the last optimisation passes take a third of the compile time without any gain here.
    """
    import jax

    if jax.default_backend() != "cpu" or LEVEL in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {LEVEL: 1}


def refuse_miscompiling_jaxlib() -> None:
    """Refuse compilers that silently compute wrong numbers.

    Our requirements exclude these versions; this catches environments that ignore them.
    """
    import jax
    import jaxlib

    if jaxlib.__version__ in MISCOMPILING and jax.default_backend() == "cpu":
        raise PevdnError(
            f"jaxlib {jaxlib.__version__} computes wrong numbers on the CPU (jax issue 39103); "
            'install another version, for example with `pip install "jax!=0.10.2" '
            '"jaxlib!=0.10.2"`.'
        )


def _jax_has_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


def cache_compilations() -> None:
    """Cache compiled programs between runs, unless the user has chosen a cache directory."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(base / "pevdn" / "jax"))


def peak_memory_bytes() -> int:
    """Return the peak memory of this process: on all GPUs if it uses any, else in main memory."""
    import resource

    import jax

    held = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
    ]
    if any(held):
        return sum(peak or 0 for peak in held)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
