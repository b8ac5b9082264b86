"""Claims about runs that are killed or interrupted: the result matches an uninterrupted run."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import (
    LONG,
    Said,
    assert_same_ending,
    checkpoints_in,
    cli,
    content,
    finish,
    lines_in,
    lines_saved,
    saved,
    start,
    train,
    train_arguments,
    wait_until,
)

import pevdn
from pevdn.training import checkpoint, figures
from pevdn.training import loop as run
from pevdn.training.loop import Run
from pevdn.training.progress import Moment, Silent

pytestmark = pytest.mark.usefixtures("compiled_once")
ALGORITHMS = ["pe-vdn-b", "pe-vdn-c"]


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
        train("pe-vdn-c", path, reporter=at_the_end)
    assert lines_in(path) < len(finished["pe-vdn-c"].metrics)
    assert_same_ending(pevdn.resume(path), finished["pe-vdn-c"])


def test_evaluations_closer_together_than_episodes_lose_no_anchor(tmp_path: Path) -> None:
    dense = {"eval_every": 1, "checkpoint_every": 1}
    whole = train("pe-vdn-c", tmp_path / "whole", steps=14, **dense)
    assert len(whole.metrics) == 15
    assert saved(whole)[1].evaluations == 15
    with pytest.raises(run.Interrupted):
        train("pe-vdn-c", tmp_path / "run", steps=14, reporter=Impatient(lambda m: True), **dense)
    assert_same_ending(pevdn.resume(tmp_path / "run"), whole)


def test_a_second_ctrl_c_does_not_wait(finished: dict[str, Run], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    twice = Impatient(lambda moment: moment.steps > 50, presses=2)
    with pytest.raises(KeyboardInterrupt):
        train("pe-vdn-b", tmp_path / "run", reporter=twice)
    assert signal.getsignal(signal.SIGINT) == before
    assert_same_ending(pevdn.resume(tmp_path / "run"), finished["pe-vdn-b"])


def test_training_works_outside_the_main_thread(finished: dict[str, Run], tmp_path: Path) -> None:
    thread = threading.Thread(target=train, args=("pe-vdn-b", tmp_path / "run"))
    thread.start()
    thread.join()
    assert_same_ending(Run(tmp_path / "run"), finished["pe-vdn-b"])
