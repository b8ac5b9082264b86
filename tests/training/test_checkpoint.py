"""Claims about damage and full disks: they are noticed, named, and lose nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import (
    Failing,
    assert_same_ending,
    checkpoints_in,
    cli,
    content,
    finish,
    refused_resume,
    saved,
    start,
    train_arguments,
)

import pevdn
from pevdn.errors import PevdnError
from pevdn.training import checkpoint
from pevdn.training.loop import Run

pytestmark = pytest.mark.usefixtures("compiled_once")


# --- damaged or foreign ----------------------------------------------------------------------


def test_resuming_a_finished_run_changes_nothing(finished: dict[str, Run]) -> None:
    path = finished["pe-vdn-b"].path
    before = content(path)
    said = cli("resume", path, "--json")
    assert said.code == 0 and said.err == ""
    assert json.loads(said.out)["updates"] == finished["pe-vdn-b"].summary["updates"]
    assert content(path) == before


def test_resuming_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert f"is {tmp_path} the directory of a run?" in refused_resume(tmp_path, 2)
    assert "the directory of a run?" in cli("resume", tmp_path / "nowhere").sentence
    assert "the directory of a run?" in cli("resume", tmp_path / "notes.txt").sentence
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]


@pytest.mark.parametrize("damage", ["deleted", "cut short", "changed"])
def test_damage_to_any_file_of_a_checkpoint_is_noticed(copy: Run, damage: str) -> None:
    newest = copy.path / "checkpoints" / str(checkpoints_in(copy.path)[-1])
    files = [p for p in newest.rglob("*") if p.is_file() and p.name != checkpoint.SEAL]
    assert len(files) > 10
    for file in files:
        whole = file.read_bytes()
        middle = len(whole) // 2
        if damage == "deleted":
            file.unlink()
        elif damage == "cut short":
            file.write_bytes(whole[:middle])
        else:
            file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(PevdnError, match="is damaged or incomplete"):
            saved(copy)
        file.write_bytes(whole)
    saved(copy)


def test_a_damaged_checkpoint_stops_the_run_and_the_older_one_saves_it(
    copy: Run, finished: dict[str, Run]
) -> None:
    newest = copy.path / "checkpoints" / str(checkpoints_in(copy.path)[-1])
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, 10)
    said = finish(start("resume", copy.path))
    assert said.code == 1
    assert f"checkpoint {newest} is damaged" in said.sentence
    assert "delete that folder to fall back on an older one" in refused_resume(copy.path, 1)
    assert "is damaged" in cli("evaluate", copy.path).sentence
    shutil.rmtree(newest)
    assert_same_ending(pevdn.resume(copy.path), finished["pe-vdn-b"])


def test_a_checkpoint_emptied_of_its_files_is_refused(copy: Run) -> None:
    for number in checkpoints_in(copy.path):
        shutil.rmtree(copy.path / "checkpoints" / str(number))
        (copy.path / "checkpoints" / str(number)).mkdir()
    assert "is damaged or incomplete" in refused_resume(copy.path, 1)


def test_the_checkpoint_of_another_run_is_refused(copy: Run, three: dict[str, Run]) -> None:
    foreign = three["pe-vdn-b"].path / "checkpoints"
    shutil.rmtree(copy.path / "checkpoints")
    shutil.copytree(foreign, copy.path / "checkpoints")
    sentence = refused_resume(copy.path, 1)
    assert "belongs to a run with another configuration" in sentence


def test_a_configuration_changed_under_a_run_is_refused(copy: Run) -> None:
    path = copy.path / "config.yaml"
    path.write_text(path.read_text().replace("gamma: 0.99", "gamma: 0.9"))
    assert "belongs to a run with another configuration" in refused_resume(copy.path, 1)


@pytest.mark.parametrize("missing", ["a line", "half a line", "everything"])
def test_metrics_cut_short_are_refused(copy: Run, missing: str) -> None:
    path = copy.path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    keep = {"a line": lines[:-1], "half a line": [*lines[:-1], lines[-1][:20]], "everything": []}
    path.write_text("".join(keep[missing]))
    sentence = refused_resume(copy.path, 1)
    assert "metrics.jsonl has" in sentence and f"made after {len(lines)}" in sentence


def test_a_damaged_summary_says_how_to_get_it_back(copy: Run, finished: dict[str, Run]) -> None:
    (copy.path / "summary.json").write_text('{"win_rate": 0')
    assert "summary.json is damaged; delete it" in refused_resume(copy.path, 1)
    (copy.path / "summary.json").unlink()
    assert_same_ending(pevdn.resume(copy.path), finished["pe-vdn-b"])


# --- a full disk -----------------------------------------------------------------------------


def fails_then_goes_on(
    disk: Failing, path: Path, reference: Run, then: str = "pevdn resume"
) -> None:
    arguments = train_arguments("pe-vdn-b", path)
    said = cli(*arguments)
    assert said.code == 1
    assert f"no space left on the disk of {path}" in said.sentence and then in said.sentence
    assert not Run(path).finished
    disk.freed = True
    assert (cli("resume", path) if then == "pevdn resume" else cli(*arguments)).code == 0
    assert_same_ending(Run(path), reference)


def test_a_disk_that_is_full_when_a_line_is_written(
    finished: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Failing(os.fsync, 3)
    monkeypatch.setattr(os, "fsync", disk)
    fails_then_goes_on(disk, tmp_path / "run", finished["pe-vdn-b"])


def test_a_disk_that_is_full_from_the_start(
    finished: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Failing(os.fsync, 0)
    monkeypatch.setattr(os, "fsync", disk)
    fails_then_goes_on(disk, tmp_path / "run", finished["pe-vdn-b"], then="train again")


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(
    finished: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.ocp.CheckpointManager
    told = ValueError("RESOURCE_EXHAUSTED: Error writing \"x\": [os_error_code='28']")
    disk = Failing(manager.save, 1, told)
    monkeypatch.setattr(manager, "save", lambda self, *args, **kwargs: disk(self, *args, **kwargs))
    fails_then_goes_on(disk, tmp_path / "run", finished["pe-vdn-b"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one checkpoint."""
    path = tmp_path / "disk"
    path.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_really_is_full(
    finished: dict[str, Run], small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = small_disk / "run"
    said = cli(*train_arguments("pe-vdn-b", path))
    assert said.code == 1 and f"no space left on the disk of {path}" in said.sentence
    assert len(checkpoints_in(path)) == 1, "the disk has another size than this test thinks"
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert cli("resume", path).code == 0
    assert_same_ending(Run(path), finished["pe-vdn-b"])
    assert "Traceback" not in "".join(capfd.readouterr())
