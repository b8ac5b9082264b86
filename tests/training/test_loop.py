"""Claims about runs: what they write, that they repeat, and that no kill, damage or full disk
changes how they end."""

from __future__ import annotations

import errno
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from support import (
    PRIVATE,
    SMALL,
    WORLD,
    Said,
    assert_same_ending,
    checkpoints_in,
    cli,
    content,
    finish,
    lines_in,
    lines_saved,
    metrics_of,
    saved,
    start,
    train,
    train_arguments,
    wait_until,
)

import pevdn
from pevdn import worlds
from pevdn.errors import PevdnError, UsageError
from pevdn.exchange.secret_shared import Code
from pevdn.policies import evaluate, policy
from pevdn.privacy import accounting
from pevdn.training import checkpoint, figures
from pevdn.training import loop as run
from pevdn.training import summary as report
from pevdn.training.loop import Run
from pevdn.training.progress import Bar, Moment, Plain, Silent

pytestmark = pytest.mark.usefixtures("compiled_once")
ALGORITHMS = ["pe-vdn-b", "pe-vdn-c"]
CONTRACT = {"seed", "env_steps", "episodes", "updates", "win_rate", "return"}
PRIVACY = {"epsilon_agent", "epsilon_team", "delta"}
# Long enough to be killed in the middle, with many lines from one checkpoint to the next.
LONG: dict[str, Any] = {"steps": 1600, "eval_every": 40, "checkpoint_every": 600}


def strict(text: str) -> Any:
    """JSON as every language reads it."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(folder: Path) -> dict[str, Run]:
    """A finished run of each algorithm; tests read it and leave it as it is."""
    return {name: train(name, folder / name) for name in ALGORITHMS}


@pytest.fixture(scope="module")
def three(folder: Path) -> dict[str, Run]:
    """Seeds 5, 6 and 7 trained side by side."""
    return {name: train(name, folder / f"{name}-three", seed=5, seeds=3) for name in ALGORITHMS}


@pytest.fixture(scope="module")
def long(folder: Path) -> Callable[[str], Run]:
    """A long run that nothing disturbed, to compare others with."""

    def made(name: str) -> Run:
        path = folder / f"{name}-long"
        return Run(path) if path.exists() else train(name, path, **LONG)

    return made


@pytest.fixture
def copy(finished: dict[str, Run], tmp_path: Path) -> Run:
    """A copy of a run that was killed just before it finished, to do what one likes with."""
    path = tmp_path / "copy"
    shutil.copytree(finished["pe-vdn-b"].path, path)
    (path / "summary.json").unlink()
    return Run(path)


# --- the run directory -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_is_a_directory_with_everything_about_it(finished: dict[str, Run], name: str) -> None:
    path = finished[name].path
    books = {"ledger.jsonl", "ledger.head"} if name == "pe-vdn-c" else set()
    assert {p.name for p in path.iterdir()} - {".lock"} == books | {
        "README.md",
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "summary.json",
        "curve.png",
    }
    config = finished[name].config
    assert (config.algorithm, config.env, config.steps) == (name, WORLD[name], 200)
    assert config.settings.hidden_size == SMALL["hidden_size"]
    assert (path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_line_of_the_metrics_keeps_the_contract(finished: dict[str, Run], name: str) -> None:
    text = (finished[name].path / "metrics.jsonl").read_text()
    lines = [strict(line) for line in text.splitlines()]
    assert text.endswith("\n") and len(lines) == 1 + 200 // SMALL["eval_every"]
    for line in lines:
        assert set(line) >= CONTRACT | (PRIVACY if name == "pe-vdn-c" else set())
        assert 0 <= line["win_rate"] <= 1
    assert (PRIVACY & set(lines[0])) == (PRIVACY if name == "pe-vdn-c" else set())


@pytest.mark.parametrize(("name", "length"), [("pe-vdn-b", 2), ("pe-vdn-c", 3)])
def test_environment_steps_are_steps_that_were_really_played(
    finished: dict[str, Run], name: str, length: int
) -> None:
    lines = finished[name].metrics
    assert (lines[0]["env_steps"], lines[0]["episodes"], lines[0]["updates"]) == (0, 0, 0)
    for due, line in zip(range(0, 201, SMALL["eval_every"]), lines, strict=True):
        assert line["env_steps"] == length * line["episodes"]
        assert due <= line["env_steps"] < due + length * SMALL["parallel_episodes"]
        assert line["episode_length"] == length


def test_learning_starts_when_it_is_told_to_and_then_follows_every_episode(
    finished: dict[str, Run],
) -> None:
    starts, together = SMALL["learning_starts"], SMALL["parallel_episodes"]
    for line in finished["pe-vdn-b"].metrics[1:]:
        assert line["updates"] == line["episodes"] - starts + together


def test_privacy_is_spent_and_never_given_back(long: Callable[[str], Run]) -> None:
    lines = long("pe-vdn-c").metrics
    for figure in ("epsilon_agent", "epsilon_team"):
        values = [line[figure] for line in lines]
        assert values[0] == 0 < values[-1] < math.inf
        assert values == sorted(values)
    assert all(line["epsilon_team"] >= line["epsilon_agent"] for line in lines)
    assert {line["delta"] for line in lines} == {PRIVATE["delta"]}


def test_a_delta_too_large_for_the_stream_is_noted_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(run._Training, "go", lambda self: None)
    monkeypatch.setattr(Silent, "note", lambda self, text: notes.append(text))
    train("pe-vdn-c", tmp_path / "small", steps=40, delta=1 / 400)
    assert [text for text in notes if "delta" in text] == []
    train("pe-vdn-c", tmp_path / "large", steps=40, delta=1e-2)
    (note,) = [text for text in notes if "delta" in text]
    assert "delta is 0.01, but should be at most a tenth of one over" in note
    assert "which can be 40 here: 0.0025 would do" in note


def test_an_infinite_epsilon_leaves_the_files_valid_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "epsilon", lambda *_: math.inf)
    noiseless = train("pe-vdn-c", tmp_path / "run", steps=40)
    assert noiseless.metrics[-1]["epsilon_team"] == noiseless.summary["epsilon_team"] == math.inf
    for file in ("metrics.jsonl", "summary.json"):
        text = (noiseless.path / file).read_text()
        assert '"epsilon_team": "inf"' in text
        for document in text.splitlines() if file == "metrics.jsonl" else [text]:
            strict(document)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_summary_repeats_the_end_of_the_metrics(finished: dict[str, Run], name: str) -> None:
    summary, last = finished[name].summary, finished[name].metrics[-1]
    for figure in {"win_rate", "return", "episodes", "updates"} | (PRIVACY & set(last)):
        assert summary[figure] == last[figure]
    assert summary["algorithm"] == name and summary["env"] == WORLD[name]
    assert summary["seeds"] == [0]
    assert summary["env_steps_per_second"] > 0
    assert 0 < summary["training_seconds"] < summary["wall_seconds"]
    assert 2**20 < summary["peak_memory_bytes"] < 2**40
    assert ("guarantee" in summary) == (name == "pe-vdn-c")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_there_is_one_line_for_each_seed_and_evaluation(three: dict[str, Run], name: str) -> None:
    seeds = [line["seed"] for line in three[name].metrics]
    assert seeds == [5, 6, 7] * (1 + 200 // SMALL["eval_every"])
    assert three[name].summary["seeds"] == [5, 6, 7]
    assert three[name].summary["late_win_rate_half_width_95"] is not None


# --- the same again --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_seed_gives_the_same_run_to_the_last_bit(
    finished: dict[str, Run], tmp_path: Path, name: str
) -> None:
    again = train(name, tmp_path / "again", checkpoint_every=10**6)
    assert metrics_of(again.path) == metrics_of(finished[name].path)
    assert all(
        np.array_equal(a, b) for a, b in zip(saved(again)[0], saved(finished[name])[0], strict=True)
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_seed_learns_the_same_beside_others_as_alone(
    three: dict[str, Run], tmp_path: Path, name: str
) -> None:
    alone = train(name, tmp_path / "alone", seed=6)
    beside = [line for line in three[name].metrics if line["seed"] == 6]
    assert alone.metrics == beside
    for mine, theirs in zip(pevdn.load(alone), pevdn.load(three[name], seed=6), strict=True):
        for a, b in zip(mine.params, theirs.params, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_another_seed_gives_another_run(three: dict[str, Run]) -> None:
    runs = [pevdn.load(three["pe-vdn-b"], seed=seed)[0].params for seed in (5, 6, 7)]
    assert not np.allclose(runs[0].output_weight, runs[1].output_weight)
    assert not np.allclose(runs[1].output_weight, runs[2].output_weight)
    lines = report.by_seed(three["pe-vdn-c"].metrics)
    assert [x["return"] for x in lines[5]] != [x["return"] for x in lines[6]]


# --- killed ----------------------------------------------------------------------------------


def kill_when(path: Path, happened: Callable[[], bool], *arguments: object) -> None:
    """SIGKILL a training at the instant something is seen on its disk."""
    process = start(*arguments)
    wait_until(process, happened)
    process.kill()
    assert finish(process).code == -signal.SIGKILL
    assert not (path / "summary.json").exists()


def is_writing_a_checkpoint(path: Path) -> bool:
    return any((path / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def test_a_run_killed_again_and_again_ends_as_if_it_never_had_been(
    long: Callable[[str], Run], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    arguments = train_arguments("pe-vdn-b", path, **LONG)

    kill_when(path, lambda: lines_in(path) >= 3, *arguments)
    assert checkpoints_in(path) == []

    kill_when(path, lambda: lines_in(path) >= lines_saved(path) + 3 > 3, "resume", path)
    assert lines_in(path) > lines_saved(path) > 0
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"seed": 0, "env_st')  # a line that the kill tore

    kill_when(path, lambda: is_writing_a_checkpoint(path), "resume", path)
    assert is_writing_a_checkpoint(path)

    assert cli("resume", path).code == 0
    assert not is_writing_a_checkpoint(path)
    assert_same_ending(Run(path), long("pe-vdn-b"))


class Killed(BaseException):
    """As sudden as it gets within one process."""


def test_a_run_killed_while_it_draws_its_curve_still_gets_one(
    copy: Run, finished: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy.path / "curve.png").unlink()

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(figures, "draw_curve", die)
        pevdn.resume(copy.path)
    assert not copy.finished
    pevdn.resume(copy.path)
    assert (copy.path / "curve.png").exists()
    assert_same_ending(copy, finished["pe-vdn-b"])


def test_what_a_kill_left_half_written_is_cleared_away(copy: Run, finished: dict[str, Run]) -> None:
    newest = copy.path / "checkpoints" / str(checkpoints_in(copy.path)[-1])
    shutil.copytree(newest / "counters", newest.with_name("77.orbax-checkpoint-tmp") / "counters")
    shutil.rmtree(newest)
    assert_same_ending(pevdn.resume(copy.path), finished["pe-vdn-b"])
    assert not is_writing_a_checkpoint(copy.path)


def test_a_checkpoint_whose_seal_was_never_written_is_still_good(
    copy: Run, finished: dict[str, Run]
) -> None:
    for seal in copy.path.rglob(checkpoint.SEAL):
        seal.unlink()
    assert_same_ending(pevdn.resume(copy.path), finished["pe-vdn-b"])


# --- interrupted -----------------------------------------------------------------------------


class Interruption(NamedTuple):
    path: Path
    second_resume: Said
    second_train: Said
    before: dict[str, bytes]
    after: dict[str, bytes]
    code: int
    screen: str


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> Iterator[Interruption]:
    """Ctrl-C at a terminal, after others have tried to train in the same directory."""
    path = folder / "interrupted"
    arguments = train_arguments("pe-vdn-b", path, **LONG)
    ours, theirs = pty.openpty()
    process = start(*arguments, stderr=theirs)
    os.close(theirs)
    shown: list[bytes] = []
    reader = threading.Thread(target=lambda: _read_all(ours, shown))
    reader.start()
    try:
        wait_until(process, lambda: lines_in(path) >= 5)
        process.send_signal(signal.SIGSTOP)
        before = content(path)
        second_resume, second_train = cli("resume", path), cli(*arguments)
        after = content(path)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        code = finish(process).code
    finally:
        process.kill()
        reader.join(10)
        os.close(ours)
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(shown).decode())
    yield Interruption(path, second_resume, second_train, before, after, code, screen)


def _read_all(terminal: int, into: list[bytes]) -> None:
    try:
        while piece := os.read(terminal, 4096):
            into.append(piece)
    except OSError:  # the other end is closed
        return


def test_a_second_process_on_the_same_run_is_refused(interrupted: Interruption) -> None:
    assert interrupted.second_resume.code == 1
    assert "is being trained by another process" in interrupted.second_resume.sentence
    assert interrupted.second_train.code == 2
    assert "holds another run" in interrupted.second_train.sentence
    assert interrupted.after == interrupted.before


def test_ctrl_c_saves_everything_and_says_how_to_go_on(interrupted: Interruption) -> None:
    assert interrupted.code == 130
    last = interrupted.screen.strip().splitlines()[-1]
    assert last.startswith("pevdn: stopped at ") and "everything is saved" in last
    assert f"`pevdn resume {interrupted.path}`" in last
    assert "Traceback" not in interrupted.screen
    assert checkpoints_in(interrupted.path) and not Run(interrupted.path).finished


def test_a_person_at_a_terminal_sees_a_bar(interrupted: Interruption) -> None:
    assert "pe-vdn-b on toy:two-step" in interrupted.screen
    assert "━" in interrupted.screen and "win rate" in interrupted.screen


def test_an_interrupted_run_ends_as_if_it_never_had_been(
    interrupted: Interruption, long: Callable[[str], Run]
) -> None:
    assert cli("resume", interrupted.path).code == 0
    assert_same_ending(Run(interrupted.path), long("pe-vdn-b"))


class Impatient(Silent):
    """Presses Ctrl-C as soon as something holds."""

    def __init__(self, enough: Callable[[Moment], bool], presses: int = 1) -> None:
        self._enough, self._presses = enough, presses

    def moment(self, moment: Moment) -> None:
        while self._presses and self._enough(moment):
            self._presses -= 1
            signal.raise_signal(signal.SIGINT)


def test_a_stop_just_before_the_last_evaluation_loses_no_anchor(
    finished: dict[str, Run], tmp_path: Path
) -> None:
    path, steps = tmp_path / "run", finished["pe-vdn-c"].config.steps
    at_the_end = Impatient(lambda moment: moment.steps == steps)
    with pytest.raises(run.Interrupted):
        train("pe-vdn-c", path, observer=at_the_end)
    assert lines_in(path) < len(finished["pe-vdn-c"].metrics)
    assert_same_ending(pevdn.resume(path), finished["pe-vdn-c"])


def test_evaluations_closer_together_than_episodes_lose_no_anchor(tmp_path: Path) -> None:
    dense = {"eval_every": 1, "checkpoint_every": 1}
    whole = train("pe-vdn-c", tmp_path / "whole", steps=14, **dense)
    assert len(whole.metrics) == 15
    assert saved(whole)[1].evaluations == 15
    with pytest.raises(run.Interrupted):
        train("pe-vdn-c", tmp_path / "run", steps=14, observer=Impatient(lambda m: True), **dense)
    assert_same_ending(pevdn.resume(tmp_path / "run"), whole)


def test_a_second_ctrl_c_does_not_wait(finished: dict[str, Run], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    twice = Impatient(lambda moment: moment.steps > 50, presses=2)
    with pytest.raises(KeyboardInterrupt):
        train("pe-vdn-b", tmp_path / "run", observer=twice)
    assert signal.getsignal(signal.SIGINT) == before
    assert_same_ending(pevdn.resume(tmp_path / "run"), finished["pe-vdn-b"])


def test_training_works_outside_the_main_thread(finished: dict[str, Run], tmp_path: Path) -> None:
    thread = threading.Thread(target=train, args=("pe-vdn-b", tmp_path / "run"))
    thread.start()
    thread.join()
    assert_same_ending(Run(tmp_path / "run"), finished["pe-vdn-b"])


# --- damaged or foreign ----------------------------------------------------------------------


def refused_resume(path: Path, code: int) -> str:
    """The sentence with which `resume` gives up, having changed nothing."""
    before = content(path)
    said = cli("resume", path)
    assert said.code == code and said.out == ""
    assert content(path) == before
    return said.sentence


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


# --- where a new run may go ------------------------------------------------------------------


def test_a_new_run_never_touches_what_is_there(finished: dict[str, Run], tmp_path: Path) -> None:
    taken = finished["pe-vdn-b"].path
    file, full = tmp_path / "file", tmp_path / "full"
    file.write_text("mine")
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    for out, why in ((taken, "holds another run"), (file, "is a file"), (full, "is not empty")):
        before = content(out if out.is_dir() else out.parent)
        said = cli(*train_arguments("pe-vdn-b", out))
        assert said.code == 2 and why in said.sentence and str(out) in said.sentence
        assert content(out if out.is_dir() else out.parent) == before
    said = cli(*train_arguments("pe-vdn-b", file / "below"))
    assert said.code == 1 and f"cannot write to {file / 'below'}" in said.sentence


def test_without_a_directory_a_run_finds_a_new_one_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run._Training, "go", lambda self: None)
    made = [pevdn.train("pe-vdn-b", "toy:two-step", steps=10).path for _ in range(3)]
    assert len(set(made)) == 3
    assert all(
        path.parent == Path("runs") and "pe-vdn-b-toy-two-step" in path.name for path in made
    )


def test_a_buffer_larger_than_the_machine_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.os, "sysconf", lambda _: 2**15)  # pages, and bytes of a page: 1 GiB
    said = cli(*train_arguments("pe-vdn-b", tmp_path / "run", buffer_size=2_000_000_000))
    assert said.code == 2
    assert "buffer_size=2000000000" in said.sentence and "set buffer_size to" in said.sentence
    assert not (tmp_path / "run").exists()


def test_a_full_gpu_is_one_sentence_and_the_run_goes_on(tmp_path, monkeypatch):
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    fails = FullDisk(run._Training._advance, 2, full)
    monkeypatch.setattr(run._Training, "_advance", lambda *args: fails(*args))
    said = cli(*train_arguments("pe-vdn-b", tmp_path / "run"))
    assert said.code == 1 and "Traceback" not in said.err
    assert "memory of the device is full" in said.err and f"pevdn resume {tmp_path}" in said.err
    fails.freed = True
    assert cli("resume", tmp_path / "run").code == 0
    assert_same_ending(Run(tmp_path / "run"), train("pe-vdn-b", tmp_path / "undisturbed"))


# --- a full disk -----------------------------------------------------------------------------


class FullDisk:
    """Stands in for a call that writes; fails from the n-th time on, until it is freed."""

    def __init__(self, real: Callable[..., Any], n: int, failure: Exception | None = None) -> None:
        self._real, self._left, self.freed = real, n, False
        self._failure = failure or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left < 0 and not self.freed:
            raise self._failure
        return self._real(*args, **kwargs)


def fails_then_goes_on(
    disk: FullDisk, path: Path, reference: Run, then: str = "pevdn resume"
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
    disk = FullDisk(os.fsync, 3)
    monkeypatch.setattr(run.os, "fsync", disk)
    fails_then_goes_on(disk, tmp_path / "run", finished["pe-vdn-b"])


def test_a_disk_that_is_full_from_the_start(
    finished: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(os.fsync, 0)
    monkeypatch.setattr(run.os, "fsync", disk)
    fails_then_goes_on(disk, tmp_path / "run", finished["pe-vdn-b"], then="train again")


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(
    finished: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.ocp.CheckpointManager
    told = ValueError("RESOURCE_EXHAUSTED: Error writing \"x\": [os_error_code='28']")
    disk = FullDisk(manager.save, 1, told)
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


# --- messages that do not fit ----------------------------------------------------------------


def test_a_message_out_of_range_stops_the_run_and_names_what_to_change(tmp_path: Path) -> None:
    path = tmp_path / "run"
    said = cli(*train_arguments("pe-vdn-b", path, precision=7, modulus="2**20"))
    assert said.code == 1
    limit = Code(7, 2**20).limit(2)
    for part in ("a message of size ", f"±{limit:g}", "precision=7", f"modulus={2**20}"):
        assert part in said.sentence
    assert checkpoints_in(path)
    assert Run(path).metrics[-1]["updates"] == 0
    assert refused_resume(path, 1) == said.sentence


def test_with_dp_no_message_stops_training_or_changes_what_is_said_about_it(
    tmp_path: Path,
) -> None:
    """No message fits into this range; in the neighbouring stream, of empty episodes, all do."""
    said = cli(*train_arguments("pe-vdn-c", tmp_path / "run", precision=7, modulus="2**20"))
    assert said.code == 0 and "message" not in said.err
    assert Run(tmp_path / "run").metrics[-1]["updates"] > 0


# --- policies --------------------------------------------------------------------------------


def test_a_loaded_policy_plays_as_evaluation_does(finished: dict[str, Run]) -> None:
    world, team = worlds.make("toy:two-step"), pevdn.load(finished["pe-vdn-b"])
    state, step = world.reset(jax.random.key(0))
    total = 0.0
    while not step.done:
        actions = team.act(step.observations, step.available)
        state, step = world.step(jax.random.key(0), state, tuple(np.int32(a) for a in actions))
        total += float(step.reward)
    assert finished["pe-vdn-b"].metrics[-1]["return"] == total
    assert evaluate.evaluate(finished["pe-vdn-b"], episodes=8)[0]["return"] == total


def test_a_policy_with_memory_earns_what_evaluation_says(finished: dict[str, Run]) -> None:
    world, team = worlds.make("toy:coordination"), pevdn.load(finished["pe-vdn-c"])
    games = {}
    for number in range(60):
        state, step = world.reset(jax.random.key(number))
        cues, total = tuple(np.asarray(state.cues).tolist()), 0.0
        if cues in games:
            continue
        team.reset()
        while not step.done:
            actions = team.act(step.observations, step.available)
            state, step = world.step(jax.random.key(0), state, tuple(np.int32(a) for a in actions))
            total += float(step.reward)
        games[cues] = total
    assert len(games) == 6  # 2 cues for one agent, 3 for the other, all equally likely
    row = evaluate.evaluate(finished["pe-vdn-c"], episodes=2048)[0]
    assert row["return"] == pytest.approx(sum(games.values()) / 6, abs=0.1)


def test_a_policy_is_deterministic_and_reset_makes_it_forget(finished: dict[str, Run]) -> None:
    team = pevdn.load(finished["pe-vdn-c"])
    random = np.random.default_rng(0)
    seen = [[random.normal(size=agent.observation_size) for agent in team] for _ in range(4)]

    def play() -> list[Any]:
        return [
            (team.act(x), [np.asarray(agent.q_values).tolist() for agent in team]) for x in seen
        ]

    first = play()
    remembering = play()
    team.reset()
    assert play() == first != remembering


def test_what_an_agent_saw_before_matters_to_what_it_does_now(finished: dict[str, Run]) -> None:
    agent = pevdn.load(finished["pe-vdn-c"])[0]
    now = np.ones(agent.observation_size)
    values = []
    for before in (-1.0, 1.0):
        agent.reset()
        agent.act(np.full(agent.observation_size, before), [True, False, False])
        agent.act(now)
        values.append(np.asarray(agent.q_values))
    assert not np.allclose(values[0], values[1])


def test_an_agent_acts_alone_as_it_acts_in_its_team(finished: dict[str, Run]) -> None:
    team, alone = pevdn.load(finished["pe-vdn-c"]), pevdn.load(finished["pe-vdn-c"])
    random = np.random.default_rng(1)
    assert [agent.observation_size for agent in team] == [5, 6]  # unlike agents
    for _ in range(5):
        seen = [random.normal(size=agent.observation_size) for agent in team]
        assert team.act(seen) == [alone[i].act(x) for i, x in enumerate(seen)]


@given(st.data())
def test_only_available_actions_are_taken(finished: dict[str, Run], data: st.DataObject) -> None:
    agent = _loaded(finished["pe-vdn-c"])[1]
    mask = data.draw(st.lists(st.booleans(), min_size=4, max_size=4).filter(any))
    seen = data.draw(st.lists(st.floats(-10, 10), min_size=6, max_size=6))
    agent.reset()
    assert mask[agent.act(seen, mask)]


def test_a_policy_names_what_does_not_fit(finished: dict[str, Run]) -> None:
    team = pevdn.load(finished["pe-vdn-c"])
    good = [np.zeros(5), np.zeros(6)]
    with pytest.raises(UsageError, match=r"shape \(4,\) was given to an agent that takes \(5,\)"):
        team.act([np.zeros(4), np.zeros(6)])
    with pytest.raises(UsageError, match="1 observations were given to 2 agents"):
        team.act(good[:1])
    with pytest.raises(UsageError, match="available actions of 1 agents were given to 2"):
        team.act(good, [[True] * 3])
    with pytest.raises(UsageError, match="with at least one true"):
        team[0].act(good[0], [False] * 3)


def test_asking_for_a_model_that_is_not_there_says_what_is(
    finished: dict[str, Run], three: dict[str, Run], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="was trained without an anchor; use model 'running'"):
        pevdn.load(finished["pe-vdn-b"], model="anchor")
    with pytest.raises(UsageError, match="was trained without an average; use model 'running'"):
        pevdn.load(finished["pe-vdn-b"], model="average")
    with pytest.raises(UsageError, match="must be 'best', 'running', 'average' or 'anchor'"):
        pevdn.load(finished["pe-vdn-b"], model="newest")
    with pytest.raises(UsageError, match=r"seed is 8, but .* has seeds 5 to 7"):
        pevdn.load(three["pe-vdn-b"], seed=8)
    hopeless = train("pe-vdn-c", tmp_path / "run", steps=40, anchor_threshold=1.0)
    with pytest.raises(UsageError, match=r"not every seed of .* has reached an anchor"):
        pevdn.load(hopeless, model="anchor")
    assert hopeless.summary["anchored_seeds"] == 0


def test_the_best_model_is_the_anchor_once_there_is_one(finished: dict[str, Run]) -> None:
    assert finished["pe-vdn-c"].summary["anchored_seeds"] == 1
    best, anchor, running = (
        pevdn.load(finished["pe-vdn-c"], model=model)[0].params.output_weight
        for model in ("best", "anchor", "running")
    )
    assert np.array_equal(best, anchor)
    assert not np.array_equal(best, running)


def test_the_average_is_evaluated_kept_and_loaded_before_the_running_model(tmp_path: Path) -> None:
    settings = {"average_decay": 0.9, "anchor_penalty": 0.0, "anchor_threshold": 1.0}  # no anchor
    run = train("pe-vdn-c", tmp_path / "run", **settings)
    assert all(0 <= line["win_rate_average"] <= 1 for line in run.metrics)
    late = [x["win_rate_average"] for x in run.metrics if x["env_steps"] >= 100]
    assert run.summary["late_win_rate_average"] == pytest.approx(sum(late) / len(late))
    best, average, running = (
        pevdn.load(run, model=model)[0].params.output_weight
        for model in ("best", "average", "running")
    )
    assert np.array_equal(best, average)
    assert not np.array_equal(best, running)


def test_where_an_average_is_kept_the_anchor_is_the_best_of_the_averages(tmp_path: Path) -> None:
    """The one that beat the threshold and was not beaten; and it is what is released."""
    common = {"average_decay": 0.9, "anchor_penalty": 0.0, "seed": 2}
    scout = train("pe-vdn-c", tmp_path / "scout", anchor_threshold=1.0, **common)
    best = max(scout.metrics[1:], key=lambda line: line["win_rate_average"])
    assert best["win_rate_average"] > scout.metrics[0]["win_rate_average"]
    common["anchor_threshold"] = best["win_rate_average"] - 0.01
    run = train("pe-vdn-c", tmp_path / "run", **common)
    first = next(line for line in run.metrics if line["win_rate_anchor"] is not None)
    assert first["env_steps"] == best["env_steps"] < run.metrics[-1]["env_steps"]
    short = train("pe-vdn-c", tmp_path / "short", steps=best["env_steps"], **common)

    def weights(run: Run, model: str) -> np.ndarray:
        return np.asarray(pevdn.load(run, model=model)[0].params.output_weight)

    assert np.array_equal(weights(run, "anchor"), weights(short, "average"))
    assert np.array_equal(weights(run, "best"), weights(run, "anchor"))
    assert not np.array_equal(weights(run, "best"), weights(run, "average"))


def test_no_two_scores_are_of_the_same_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above all: an anchor is not scored on the episodes for which it was chosen."""
    real, drawn = run.evaluation_keys, []

    def draw(seeds: Any, number: int) -> Any:
        keys = real(seeds, number)
        drawn.append(tuple(jax.random.key_data(keys[0]).tolist()))
        return keys

    monkeypatch.setattr(run, "evaluation_keys", draw)
    trained = train("pe-vdn-c", tmp_path / "run", average_decay=0.9, anchor_penalty=0.0)
    assert all("win_rate_anchor" in line and "win_rate_average" in line for line in trained.metrics)
    assert len(set(drawn)) == len(drawn) == 3 * len(trained.metrics)


def test_loading_a_run_changes_nothing_and_says_when_there_is_nothing(
    finished: dict[str, Run], tmp_path: Path
) -> None:
    path = finished["pe-vdn-b"].path
    before = content(path)
    pevdn.load(str(path))
    assert content(path) == before
    empty = tmp_path / "run"
    empty.mkdir()
    shutil.copy(path / "config.yaml", empty)
    with pytest.raises(PevdnError, match="holds no complete checkpoint"):
        pevdn.load(empty)
    assert [p.name for p in empty.iterdir()] == ["config.yaml"]


_kept: dict[Path, policy.Policy] = {}


def _loaded(of: Run) -> policy.Policy:
    if of.path not in _kept:
        _kept[of.path] = pevdn.load(of)
    return _kept[of.path]


# --- evaluation ------------------------------------------------------------------------------


def test_an_evaluation_repeats_with_its_seed(finished: dict[str, Run]) -> None:
    path = finished["pe-vdn-c"].path
    first, again, other = (
        cli("evaluate", path, "--episodes", 16, "--seed", seed, "--json") for seed in (3, 3, 4)
    )
    assert first.code == 0 and first == again
    row, other_row = (strict(said.out)["seeds"][0] for said in (first, other))
    assert row["seed"] == 0
    assert row["win_rate_low"] <= row["win_rate"] <= row["win_rate_high"]
    assert row != other_row


def test_every_evaluation_of_every_seed_plays_episodes_of_its_own() -> None:
    def keys(number: int) -> list[Any]:
        return jax.random.key_data(run.evaluation_keys(jnp.arange(3), number)).tolist()

    all_of_them = [tuple(key) for number in range(4) for key in keys(number)]
    assert len(set(all_of_them)) == 12
    training = {tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in range(3)}
    assert not training & set(all_of_them)
    assert keys(1) == keys(1)


def test_every_seed_of_a_run_is_evaluated(three: dict[str, Run]) -> None:
    rows = evaluate.evaluate(three["pe-vdn-b"], episodes=16)
    assert [row["seed"] for row in rows] == [5, 6, 7]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"episodes": 0}, "episodes is 0, but must be at least 1"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
        ({"seed": 2**40}, "seed is 1099511627776, but must be at most"),
    ],
)
def test_an_evaluation_out_of_range_is_refused(
    finished: dict[str, Run], what: dict[str, int], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        evaluate.evaluate(finished["pe-vdn-b"], **what)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_of_a_win_rate_is_wilsons(drawn: tuple[int, int]) -> None:
    won, played = drawn
    low, high = evaluate.wilson(won, played)
    exact = scipy.stats.binomtest(won, played).proportion_ci(0.95, method="wilson")
    assert low == pytest.approx(exact.low, abs=1e-6)
    assert high == pytest.approx(exact.high, abs=1e-6)
    assert 0 <= low <= won / played + 1e-12 and won / played <= high + 1e-12 <= 1 + 1e-12


# --- figures to quote ------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_confidence_is_students(values: list[float]) -> None:
    mean, half = report.confidence(values)
    assert mean == pytest.approx(np.mean(values))
    error = scipy.stats.sem(values)
    wanted = scipy.stats.t.interval(0.95, len(values) - 1, mean, error)[1] - mean if error else 0
    assert half == pytest.approx(wanted, abs=1e-9)


def test_one_value_has_no_spread() -> None:
    assert report.confidence([0.25]) == (0.25, None)


def test_the_late_mean_covers_the_last_window_or_the_later_half() -> None:
    lines = [{"env_steps": n, "win_rate": n / 1000} for n in range(0, 1001, 100)]
    assert report.late_mean(lines, "win_rate", window=200) == pytest.approx(0.9)
    assert report.late_mean(lines, "win_rate", window=10**6) == pytest.approx(0.75)
    assert report.late_mean(lines[:1], "win_rate") == 0
    assert report.late_mean(lines, "win_rate_anchor") is None
    some = [{**line, "win_rate_anchor": 0.5 if line["env_steps"] > 900 else None} for line in lines]
    assert report.late_mean(some, "win_rate_anchor") == 0.5


def test_the_curve_in_text_has_its_shape() -> None:
    rising = figures.text_curve([(0, 0.0), (500, 0.5), (1000, 1.0)], width=20, height=4)
    *rows, axis, label = rising.splitlines()
    assert len(rows) == 4 and {len(row) for row in [*rows, axis, label]} == {25}
    assert rows[0].startswith("1.0 │") and rows[3].startswith("0.0 │")
    assert label.endswith("1,000 steps")
    heights = [sum(row[5 + x] == "█" for row in rows) for x in range(20)]
    assert heights == [0] * 10 + [2] * 9 + [4]
    assert figures.text_curve([]) == ""


def test_a_mean_curve_waits_for_the_slowest_seed() -> None:
    def line(seed: int, steps: int, rate: float | None) -> dict[str, Any]:
        return {"seed": seed, "env_steps": steps, "win_rate_anchor": rate}

    lines = [line(0, 0, None), line(1, 0, None), line(0, 10, 0.5), line(1, 20, None)]
    lines.append(line(0, 30, 1.0))
    assert figures.mean_curve(lines, "win_rate_anchor") == [(15, 0.5)]


def test_epsilon_over_seeds_is_the_worst_and_everything_else_the_mean() -> None:
    lines = [{"win_rate": 0.0, "epsilon_team": 1.0}, {"win_rate": 1.0, "epsilon_team": 3.0}]
    assert run.mean_of_seeds(lines) == {"win_rate": 0.5, "epsilon_team": 3.0}


# --- progress --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Plain, Bar])
def test_progress_is_shown_on_standard_error_alone(
    kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = kind()
    observer.note("compiling")
    observer.start("pe-vdn-c on toy", 100, 0)
    seen = {"win_rate": 0.25, "win_rate_anchor": 0.5, "epsilon_agent": 1.0, "epsilon_team": 2.0}
    observer.moment(Moment(0, 0.0))
    observer.moment(Moment(50, 1234.0, seen))
    observer.stop()
    shown = capsys.readouterr()
    assert shown.out == "" and "pe-vdn-c on toy" in shown.err
    assert "win rate 0.25 (anchor 0.50) · ε team 2.00" in shown.err
    assert "1,234" in shown.err and "50" in shown.err


def test_the_bar_of_a_long_run_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    bar = Bar()
    bar.start("a run", 10_000_000, 0)
    bar.moment(Moment(9_876_543, 123_456.0, {"win_rate": 0.25}))
    bar.stop()
    assert "9,876,543/10,000,000 123,456/s 0:00:0" in capsys.readouterr().err


def test_plain_progress_is_one_line_for_each_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    observer, seen = Plain(), {"win_rate": 0.25}
    observer.start("a run", 100, 0)
    for steps in (10, 20, 30):
        observer.moment(Moment(steps, 1.0, seen))
    observer.moment(Moment(40, 1.0, {"win_rate": 0.5}))
    assert len(capsys.readouterr().err.splitlines()) == 3
