"""What every test shares: a compilation cache, repeatable examples, and GPU tests only on a GPU."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from copy import copy as shallow_copy
from importlib.metadata import version
from pathlib import Path
from typing import Any

# JAX reads these once, when it is first imported.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tests compile much and compute little: let XLA compile fast rather than compile to fast code.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=2"
)
if version("jaxlib").startswith("0.10."):  # later versions have no such flag, and end the process
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import pevdn  # noqa: F401, I001  (before JAX: it sets the XLA flags)
import jax
import pytest
import support
from hypothesis import settings

from pevdn.training.directory import Run

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=25, database=None
)
settings.load_profile("repeatable")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU and JAX found only: {jax.default_backend()}")


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """Trainings in this process share their programs; those in processes of their own do not."""
    from pevdn.training.loop import _Training

    real, kept = _Training._compile, {}
    parts = ("advance", "evaluate", "compile_seconds")
    outside = {
        "eval_every": 1,
        "anchor_threshold": 0.0,
        "epsilon_budget": 0.0,
        "budget_observer": "team",
        "relation": "zero-out",
    }

    def compile_once(self: Any) -> None:
        if self.options.buffer == "host":  # its programs come with its episodes
            return real(self)
        settings = dataclasses.replace(self.config.settings, **outside)
        program = dataclasses.replace(self.config, steps=1, seed=0, settings=settings)
        if program not in kept:
            real(self)
            kept[program] = {name: getattr(self, name) for name in parts}
        vars(self).update(kept[program])
        self.evaluate = shallow_copy(self.evaluate)
        self.evaluate.seeds = self.seeds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Training, "_compile", compile_once)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the runs that tests share."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def finished(folder: Path) -> dict[str, Run]:
    """A finished run of each algorithm; tests only read it."""
    return {name: support.train(name, folder / name) for name in support.WORLD}


@pytest.fixture(scope="session")
def three(folder: Path) -> dict[str, Run]:
    """Runs with the seeds 5, 6 and 7; tests only read them."""
    return {
        name: support.train(name, folder / f"{name}-three", seed=5, seeds=3)
        for name in support.WORLD
    }


@pytest.fixture(scope="session")
def long(folder: Path) -> Callable[[str], Run]:
    """A long undisturbed run, to compare others with."""

    def made(name: str) -> Run:
        path = folder / f"{name}-long"
        return Run(path) if path.exists() else support.train(name, path, **support.LONG)

    return made


@pytest.fixture
def copy(finished: dict[str, Run], tmp_path: Path) -> Run:
    """A copy of a run that was killed just before it finished, for tests to change."""
    path = tmp_path / "copy"
    shutil.copytree(finished["pe-vdn-b"].path, path)
    (path / "summary.json").unlink()
    return Run(path)
