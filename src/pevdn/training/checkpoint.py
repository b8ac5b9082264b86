"""Everything a run needs to go on, saved with orbax so that a kill at any instant loses nothing.

A checkpoint is written beside the old one and renamed into place; what a kill left half written
is cleared away. Replay buffers are saved up to the last slot ever written. A seal over its files
shows damage, and the configuration's fingerprint travels along, so that the checkpoint of another
run is refused. No file names the place where it was written.
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
from pevdn.simulation.program import Simulation, State
from pevdn.simulation.replays import HostReplay
from pevdn.storage.files import draft_of, write_atomically
from pevdn.training.loop import Progress

logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells its life story

OVERHEAD = 2**20  # bytes of disk, more than orbax's own files take
SEAL = "seal.sha256"  # the file of a checkpoint that vouches for all others
COMMITTED = "commit_success.txt"  # written by orbax, which puts the absolute path into it

# What `forget` keeps of the counters; all others are zeroed, random keys among them.
KEPT = {"env_steps", "episodes", "updates", "exposure", "exhausted", "anchored", "threshold"}


class _FilesHandler(ocp.CheckpointHandler):
    """Replay buffers in host memory, as plain files: a copy as arrays might not fit beside them."""

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
    """The checkpoints of one run directory; the two newest are kept. A reader changes nothing."""

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
        if not read_only:  # a kill just before sealing has left these as orbax wrote them
            for number in self._manager.all_steps():
                if not (self._folder(number) / SEAL).exists():
                    _remove_paths(self._folder(number))

    def _folder(self, number: int) -> Path:
        return self.directory / str(number)

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: State, progress: Progress, simulation: Simulation) -> None:
        # Grows with training and with every evaluation, so that no two states have the same number.
        number = int(np.sum(np.asarray(state.env_steps))) + progress.evaluations
        if number == self.latest:
            return
        stored = int(min(np.max(np.asarray(state.episodes)), self.config.settings.buffer_size))
        filled = max(1, stored)  # orbax saves no empty arrays
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
        except Exception as problem:  # tensorstore hides what the system said in its message
            code = re.search(r"os_error_code='(\d+)'", str(problem))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
        _remove_paths(self._folder(number))
        _seal(self._folder(number))

    def forget(self) -> None:
        """Keep of the newest checkpoint what it takes to act, and nothing else of any.

        The stored episodes are left out of a new checkpoint; optimiser state and random keys are
        zeros in it. The others are deleted once it is on the disk, so that after a kill the newest
        one is whole, and calling this again finishes the work.
        """
        found = self._read("learners", "counters", "progress")
        if not found["progress"].get("forgotten"):
            learners = {
                name: np.zeros_like(x) if name.split(".")[1] == "optimiser" else np.asarray(x)
                for name, x in found["learners"].items()
            }
            counters = {
                name: np.asarray(x) if name in KEPT else np.zeros_like(x)
                for name, x in found["counters"].items()
            }
            self._need_room(sum(x.nbytes for x in (*learners.values(), *counters.values())))
            args = ocp.args.Composite(
                learners=ocp.args.StandardSave(learners),
                counters=ocp.args.StandardSave(counters),
                progress=ocp.args.JsonSave({**found["progress"], "forgotten": True}),
            )
            assert self.latest is not None  # it has just been read
            self._write(self.latest + 1, args)
        newest = self.latest
        assert newest is not None
        if not (self._folder(newest) / SEAL).exists():  # a kill came just before
            _seal(self._folder(newest))
        os.sync()
        for number in self._manager.all_steps():
            if number != newest:
                self._manager.delete(number)

    def _need_room(self, size: int) -> None:
        """Ask first: when a write fails halfway, orbax's threads print a traceback each."""
        if shutil.disk_usage(self.directory).free < size + OVERHEAD:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _forgotten(self) -> bool:
        step = self.latest
        if step is None or (self._folder(step) / "replays").exists():
            return False
        return bool(self._read("progress")["progress"].get("forgotten"))

    def restore(self, simulation: Simulation) -> tuple[State, Progress]:
        """The newest state of the run, exactly as it was saved, in the machine's own memory."""
        if self._forgotten():
            raise PevdnError(
                f"{self.directory.parent} has forgotten its stored episodes, optimiser state and "
                "random keys (`pevdn forget`), so that it cannot be trained further; what it has "
                "learnt can still be evaluated, replayed, exported and published."
            )
        found = self._read("learners", "replays", "counters", "progress", simulation=simulation)
        template = _parts(simulation.like())
        state = State(
            self._rebuild(found["learners"], template.learners),
            self._rebuild(found["replays"], template.replays),
            **self._rebuild(found["counters"], template.counters),
        )
        progress = {k: v for k, v in found["progress"].items() if k != "fingerprint"}
        return state, Progress(**progress)

    def restore_learners(self, simulation: Simulation) -> tuple[tuple[Learner, ...], jax.Array]:
        """Only what the agents learnt, and which lanes have an anchor (S,): enough to act."""
        found = self._read("learners", "counters", "progress")
        template = _parts(simulation.like())
        counters = self._rebuild(found["counters"], template.counters)
        learners = self._rebuild(found["learners"], template.learners)
        return jax.tree.map(jnp.asarray, (learners, counters["anchored"]))

    def _rebuild(self, found: dict[str, Any], template: Any) -> Any:
        arrays = [self._fitted(name, found, leaf) for name, leaf in _names(template).items()]
        return jax.tree.unflatten(jax.tree.structure(template), arrays)

    def _read(self, *groups: str, simulation: Simulation | None = None) -> dict[str, Any]:
        step = self.latest
        if step is None:
            raise PevdnError(f"{self.directory} holds no complete checkpoint.")
        folder = self._folder(step)
        if _broken(folder):  # ask first, as with room on the disk
            raise self._damaged(folder, "its files are not what was saved")
        how = {
            group: ocp.args.JsonRestore() if group == "progress" else ocp.args.StandardRestore()
            for group in groups
        }
        if simulation is not None and simulation.replay.on_host:
            how["replays"] = _Files(simulation.replay)
        try:
            found = dict(self._manager.restore(step, args=ocp.args.Composite(**how)).items())
        except Exception as problem:  # orbax and tensorstore raise all kinds on a damaged file
            reason = " ".join(str(problem).split())[:160]
            raise self._damaged(folder, f"{type(problem).__name__}: {reason}") from None
        if found["progress"]["fingerprint"] != fingerprint(self.config):
            raise PevdnError(
                f"checkpoint {folder} belongs to a run with another "
                "configuration than config.yaml says; restore the config.yaml it was made with."
            )
        return found

    def _damaged(self, folder: Path, reason: str) -> PevdnError:
        return PevdnError(
            f"checkpoint {folder} is damaged or incomplete ({reason}); delete that folder to fall "
            "back on an older one, or train anew."
        )

    def _fitted(self, name: str, found: dict[str, Any], leaf: Any) -> Any:
        """A saved array in the shape the program wants; replays are filled up with zeros."""
        array = found.get(name)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        shape = jax.eval_shape(jax.random.key_data, leaf).shape if is_key else leaf.shape
        if array is None or array.ndim != len(shape):
            raise PevdnError(
                f"a checkpoint in {self.directory} does not fit this version of pevdn: "
                f"'{name}' is missing or of another shape; train anew."
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
    """Of all files in a checkpoint, their names and their contents."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path not in (folder / SEAL, draft_of(folder / SEAL)):
            with path.open("rb") as file:
                whole.update(str(path.relative_to(folder)).encode())
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _remove_paths(folder: Path) -> None:
    """Orbax asks whether these files exist, and not what is in them."""
    for file in folder.rglob(COMMITTED):
        file.write_text("committed")


def _seal(folder: Path) -> None:
    write_atomically(folder / SEAL, _digest(folder))


def _broken(folder: Path) -> bool:
    """Whether a seal says so; a kill just before sealing leaves a good checkpoint without one."""
    seal = folder / SEAL
    return seal.exists() and seal.read_text(errors="replace") != _digest(folder)


class _Parts(NamedTuple):
    """What is saved together."""

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
