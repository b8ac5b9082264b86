"""Delete what a finished run needed only for training: episodes, optimiser state, random keys.

The rest is enough to evaluate, replay, export and publish, and to read the ledger. Files are
deleted, not overwritten: the file system, its snapshots and backups may keep their blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pevdn.errors import UsageError
from pevdn.privacy import randomness, secret
from pevdn.storage.files import disk_errors, lock, write_atomically
from pevdn.storage.readme import FILE as README
from pevdn.training import readme
from pevdn.training.directory import Run


class Forgotten(NamedTuple):
    """The result of `forget`."""

    run: Path
    bytes_before: int  # of checkpoints and secret
    bytes_after: int
    seed_kept: bool  # whether noise and samples still derive from the seed in config.yaml


def forget(run: Run | str | Path) -> Forgotten:
    """Delete stored episodes, optimiser state, random keys and the file `secret` of a finished run.

    After a kill the run can still be used, and another call completes the deletion. An unfinished
    run is refused: it needs its state to continue.
    """
    run = run if isinstance(run, Run) else Run(Path(run))
    config = run.config
    if not (run.path / "checkpoints").exists() and any(run.path.glob("snapshot-*")):
        raise UsageError(
            f"{run.path} is the data of a party, and peers may still need its last step; once all "
            "members have finished, delete its episodes-*.bin, journal-*.jsonl and secret."
        )
    if not run.finished:
        raise UsageError(
            f"{run.path} is not finished and needs its stored episodes to continue; finish it with "
            f"`pevdn resume {run.path}` first."
        )
    from pevdn.training.checkpoint import Checkpoints  # importing orbax takes a second

    before = _size(run.path)
    with disk_errors(run.path), lock(run.path):
        checkpoints = Checkpoints(run.path, config)
        try:
            checkpoints.forget()
        finally:
            checkpoints.close()
        (run.path / secret.FILE).unlink(missing_ok=True)
        text = readme.of_run(config, True, run.summary.get("epsilon_record"))
        write_atomically(run.path / README, text)
    return Forgotten(run.path, before, _size(run.path), randomness.source(config) == "seed")


def _size(path: Path) -> int:
    files = [path / secret.FILE, *(path / "checkpoints").rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())
