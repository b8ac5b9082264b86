"""Checkpoints of a run, written with orbax.

A checkpoint is written beside the previous one and renamed into place, so a kill leaves one of
them; incomplete ones are removed. Replay buffers are saved up to the last slot ever written. A
checksum over the files (the seal) detects damage, and the configuration's fingerprint detects the
checkpoint of another run. No file contains the path where it was written.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from pevdn.agent.learning import Learner
from pevdn.config.experiment import Config, fingerprint
from pevdn.errors import PevdnError
from pevdn.privacy.randomness import generator
from pevdn.simulation.program import Simulation
from pevdn.simulation.replays import HostReplay
from pevdn.simulation.state import State
from pevdn.storage.files import draft_of, write_atomically

logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs every step

OVERHEAD = 2**20  # bytes: an upper bound of orbax's own files
SEAL = "seal.sha256"  # checksum of all other files of a checkpoint
COMMITTED = "commit_success.txt"  # orbax writes the absolute path into it

# Counters that `forget` keeps; it zeroes the others, random keys among them.
KEPT = {"env_steps", "episodes", "updates", "exposure", "exhausted", "anchored", "threshold"}


@dataclasses.dataclass
class Progress:
    """The state of a run outside the compiled program."""

    evaluations: int = 0
    metrics_lines: int = 0  # lines of metrics.jsonl that belong to this state
    training_seconds: float = 0.0
    training_steps: int = 0  # environment steps made in those seconds
    wall_seconds: float = 0.0
    budget_spent: bool = False  # no seed can afford another update
    ledger_line: int = 0  # the ledger's position of this state, and its checksum
    ledger_check: str = ""


class _FilesHandler(ocp.CheckpointHandler):
    """Save packed replay buffers as plain files: a copy as arrays might not fit into memory."""

    def save(self, directory: Any, args: _Files) -> None:
        args.replay.save(Path(directory))

    def restore(self, directory: Any, args: _Files) -> dict[str, Any]:
        args.replay.load(Path(directory))
        return {}


@ocp.args.register_with_handler(_FilesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _Files(ocp.args.CheckpointArgs):
    replay: HostReplay


class Checkpoints:
    """The two newest checkpoints of a run; `read_only` changes no file."""

    def __init__(self, directory: Path, config: Config, read_only: bool = False) -> None:
        self.directory = directory / "checkpoints"
        self.config = config
        self._manager = ocp.CheckpointManager(
            self.directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2,
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
                read_only=read_only,
            ),
        )
        if not read_only:  # a kill before sealing leaves the files as orbax wrote them
            for number in self._manager.all_steps():
                if not (self._folder(number) / SEAL).exists():
                    _remove_paths(self._folder(number))

    def _folder(self, number: int) -> Path:
        return self.directory / str(number)

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: State, progress: Progress, simulation: Simulation) -> None:
        # Grows with training and with every evaluation: no two states have the same number.
        number = int(np.sum(np.asarray(state.env_steps))) + progress.evaluations
        if number == self.latest:
            return
        stored = int(min(np.max(np.asarray(state.episodes)), self.config.settings.buffer_size))
        filled = max(1, stored)  # orbax cannot save empty arrays
        learners, replays, counters = _flattened(state)
        replays = {k: v[:, :, :filled] for k, v in replays.items()}
        arrays = jax.tree.leaves((learners, replays, counters))
        self._need_room(sum(x.nbytes for x in arrays) + simulation.replay.nbytes)
        on_host = simulation.replay.on_host
        args = ocp.args.Composite(
            learners=ocp.args.StandardSave(learners),
            replays=_Files(simulation.replay) if on_host else ocp.args.StandardSave(replays),
            counters=ocp.args.StandardSave(counters),
            progress=ocp.args.JsonSave(
                {**dataclasses.asdict(progress), "fingerprint": fingerprint(self.config)}
            ),
        )
        self._write(number, args)

    def _write(self, number: int, args: ocp.args.Composite) -> None:
        try:
            self._manager.save(number, args=args)
        except Exception as problem:  # tensorstore puts the system's error code into its message
            code = re.search(r"os_error_code='(\d+)'", str(problem))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
        _remove_paths(self._folder(number))
        _seal(self._folder(number))

    def forget(self) -> None:
        """Reduce the newest checkpoint to what acting needs, and delete all others.

        A new checkpoint without stored episodes, with optimiser state and random keys set to zero,
        is written before the others are deleted. After a kill the newest one is complete, and
        another call completes the deletion.
        """
        saved = self._read("learners", "counters", "progress")
        if not saved["progress"].get("forgotten"):
            learners = {
                name: np.zeros_like(x) if name.split(".")[1] == "optimiser" else np.asarray(x)
                for name, x in saved["learners"].items()
            }
            counters = {
                name: np.asarray(x) if name in KEPT else np.zeros_like(x)
                for name, x in saved["counters"].items()
            }
            self._need_room(sum(x.nbytes for x in (*learners.values(), *counters.values())))
            args = ocp.args.Composite(
                learners=ocp.args.StandardSave(learners),
                counters=ocp.args.StandardSave(counters),
                progress=ocp.args.JsonSave({**saved["progress"], "forgotten": True}),
            )
            assert self.latest is not None
            self._write(self.latest + 1, args)
        newest = self.latest
        assert newest is not None
        if not (self._folder(newest) / SEAL).exists():  # after a kill before sealing
            _seal(self._folder(newest))
        os.sync()
        for number in self._manager.all_steps():
            if number != newest:
                self._manager.delete(number)

    def _need_room(self, size: int) -> None:
        """Check beforehand: on a failed write each of orbax's threads prints a traceback."""
        if shutil.disk_usage(self.directory).free < size + OVERHEAD:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _forgotten(self) -> bool:
        step = self.latest
        if step is None or (self._folder(step) / "replays").exists():
            return False
        return bool(self._read("progress")["progress"].get("forgotten"))

    def restore(self, simulation: Simulation) -> tuple[State, Progress]:
        """Return the newest state, bit for bit, in host memory."""
        if self._forgotten():
            raise PevdnError(
                f"{self.directory.parent} has no stored episodes, optimiser state and random keys "
                "any more (`pevdn forget`) and cannot be trained further; its policies can still "
                "be evaluated, replayed, exported and published."
            )
        saved = self._read("learners", "replays", "counters", "progress", simulation=simulation)
        template = _parts(simulation.like())
        state = State(
            self._rebuild(saved["learners"], template.learners),
            self._rebuild(saved["replays"], template.replays),
            **self._rebuild(saved["counters"], template.counters),
        )
        progress = {k: v for k, v in saved["progress"].items() if k != "fingerprint"}
        return state, Progress(**progress)

    def restore_learners(self, simulation: Simulation) -> tuple[tuple[Learner, ...], jax.Array]:
        """Return the learners, and which lanes have an anchor (S,): enough to act."""
        saved = self._read("learners", "counters", "progress")
        template = _parts(simulation.like())
        counters = self._rebuild(saved["counters"], template.counters)
        learners = self._rebuild(saved["learners"], template.learners)
        return jax.tree.map(jnp.asarray, (learners, counters["anchored"]))

    def _rebuild(self, saved: dict[str, Any], template: Any) -> Any:
        arrays = [self._fitted(name, saved, leaf) for name, leaf in _names(template).items()]
        return jax.tree.unflatten(jax.tree.structure(template), arrays)

    def _read(self, *groups: str, simulation: Simulation | None = None) -> dict[str, Any]:
        step = self.latest
        if step is None:
            raise PevdnError(f"{self.directory} holds no complete checkpoint.")
        folder = self._folder(step)
        if _broken(folder):  # before orbax reads it, for the same reason
            raise self._damaged(folder, "its files have changed")
        restore = {
            group: ocp.args.JsonRestore() if group == "progress" else ocp.args.StandardRestore()
            for group in groups
        }
        if simulation is not None:
            packed = not (folder / "replays" / "_METADATA").exists()  # orbax writes it for arrays
            if packed != simulation.replay.on_host:
                raise PevdnError(
                    f"checkpoint {folder} holds replay buffers of buffer="
                    f"{'host' if packed else 'device'}, but config.yaml says otherwise; restore "
                    "the original config.yaml."
                )
            if packed:
                restore["replays"] = _Files(simulation.replay)
        try:
            saved = dict(self._manager.restore(step, args=ocp.args.Composite(**restore)).items())
        except Exception as problem:  # orbax and tensorstore raise many kinds
            reason = " ".join(str(problem).split())[:160]
            raise self._damaged(folder, f"{type(problem).__name__}: {reason}") from None
        if saved["progress"]["fingerprint"] != fingerprint(self.config):
            raise PevdnError(
                f"checkpoint {folder} belongs to a run with another "
                "configuration than config.yaml says; restore the original config.yaml."
            )
        return saved

    def _damaged(self, folder: Path, reason: str) -> PevdnError:
        return PevdnError(
            f"checkpoint {folder} is damaged or incomplete ({reason}); delete that folder to fall "
            "back on an older one, or train anew."
        )

    def _fitted(self, name: str, saved: dict[str, Any], leaf: Any) -> Any:
        """Return a saved array in the shape of `leaf`; replays are padded with zeros."""
        array = saved.get(name)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        shape = jax.eval_shape(jax.random.key_data, leaf).shape if is_key else leaf.shape
        if array is None or array.ndim != len(shape):
            raise PevdnError(
                f"a checkpoint in {self.directory} does not fit this version of pevdn: "
                f"'{name}' is missing or has another shape; train anew."
            )
        if is_key:
            return jax.random.wrap_key_data(jnp.asarray(array), impl=generator(self.config))
        if array.shape == shape:
            return array
        full = np.zeros(shape, leaf.dtype)
        full[:, :, : array.shape[2]] = array
        return full

    def close(self) -> None:
        self._manager.close()


def _digest(folder: Path) -> str:
    """Hash the names and contents of all files of a checkpoint."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path not in (folder / SEAL, draft_of(folder / SEAL)):
            with path.open("rb") as file:
                whole.update(str(path.relative_to(folder)).encode())
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _remove_paths(folder: Path) -> None:
    """Remove absolute paths; orbax only checks that these files exist."""
    for file in folder.rglob(COMMITTED):
        file.write_text("committed")


def _seal(folder: Path) -> None:
    write_atomically(folder / SEAL, _digest(folder))


def _broken(folder: Path) -> bool:
    """Whether the seal does not match; a kill before sealing leaves a good checkpoint unsealed."""
    seal = folder / SEAL
    return seal.exists() and seal.read_text(errors="replace") != _digest(folder)


class _Parts(NamedTuple):
    """The groups of arrays in a checkpoint."""

    learners: Any
    replays: Any
    counters: dict[str, Any]


def _parts(state: State) -> _Parts:
    counters = {k: v for k, v in state._asdict().items() if k not in ("learners", "replays")}
    return _Parts(state.learners, state.replays, counters)


def _names(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _flattened(state: State) -> list[dict[str, np.ndarray]]:
    def plain(leaf: Any) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return [{k: plain(v) for k, v in _names(part).items()} for part in _parts(state)]
