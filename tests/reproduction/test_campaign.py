"""A campaign of runs: stopped, resumed, refused, side by side."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from campaigns import begun, pretend
from support import SMALL, assert_same_ending, cli, content, train

from pevdn.config import experiment as config
from pevdn.errors import UsageError
from pevdn.reproduction import (
    figure1,
)
from pevdn.reproduction.campaign import Arm, train_all
from pevdn.reproduction.experiment import Request
from pevdn.training import loop as run
from pevdn.training.progress import Moment, Silent

pytestmark = pytest.mark.usefixtures("compiled_once")


class Impatient(Silent):
    """Presses Ctrl-C once, as soon as something holds."""

    def __init__(self, enough: Callable[[], bool]) -> None:
        self.enough, self.pressed, self.notes = enough, False, list[str]()
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, title: str, steps: int, done: int) -> None:
        self.notes.append(title)

    def moment(self, moment: Moment) -> None:
        self.said.append(moment.overall)
        if not self.pressed and self.enough():
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


def patient() -> Impatient:
    return Impatient(lambda: False)


def small_arms(folder: Path) -> list[Arm]:
    """Two that share one compiled program."""
    return [
        Arm(
            f"seed-{seed}",
            config.make("pe-vdn-b", "toy:two-step", 200, 1, seed, SMALL),
            folder / f"seed-{seed}",
        )
        for seed in (0, 5)
    ]


def test_a_campaign_that_was_stopped_goes_on_and_ends_as_if_it_never_had_been(
    tmp_path: Path,
) -> None:
    first, second = arms = small_arms(tmp_path)
    stop = Impatient(lambda: first.over and second.steps >= 80)
    with pytest.raises(
        run.Interrupted, match=r"in seed-5, arm 2 of 2; .* repeat the command to continue"
    ):
        train_all(arms, stop)
    assert first.over and second.begun and not second.over
    assert any(title.startswith("arm 2 of 2, seed-5: pe-vdn-b on toy") for title in stop.notes)
    assert any(told.startswith("all arms: about ") for told in stop.said)
    before, watcher = content(first.path), patient()
    train_all(arms, watcher)
    assert content(first.path) == before
    assert watcher.notes[0] == "1 of 2 arms are already finished."
    assert_same_ending(second.run, train("pe-vdn-b", tmp_path / "undisturbed", seed=5))
    before = content(tmp_path)
    train_all(arms, patient())
    assert content(tmp_path) == before


def test_a_directory_with_another_run_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    first, second = small_arms(tmp_path)
    pretend(second, [[0.5] * 6])
    other = Arm(second.name, config.make("iql", "toy:two-step", 300, 1, 5, SMALL), second.path)
    with pytest.raises(
        UsageError, match=r"seed-5 holds a run with algorithm=pe-vdn-b \(requested: iql"
    ):
        train_all([first, other], patient())
    (first.path / "other").mkdir(parents=True)
    with pytest.raises(UsageError, match="is not empty; choose another --out"):
        train_all([first, second], patient())
    assert not first.begun


def test_a_refusal_is_a_result_only_where_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = small_arms(tmp_path)

    def refuse(arm: Arm, *_: object) -> None:
        arm.path.mkdir(exist_ok=True)
        (arm.path / "config.yaml").write_text(config.to_text(arm.config))
        raise run.MessageRefused("a message of size 9 does not fit.")

    monkeypatch.setattr(Arm, "train", refuse)
    with pytest.raises(run.MessageRefused):
        train_all(arms, patient())
    train_all(arms, patient(), may_refuse=True)
    assert [arm.refused for arm in arms] == ["a message of size 9 does not fit."] * 2
    monkeypatch.setattr(Arm, "train", None)  # it is not tried again
    train_all(arms, patient(), may_refuse=True)


# Side by side: processes that do as a training does, without its weight.

FINISHES = "import sys, pathlib; pathlib.Path(sys.argv[1], 'summary.json').write_text('{}')"
WAITS = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1], 'saved').write_text('')
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], 'ready').write_text('')
time.sleep(60)
"""


def stand_in(program: str) -> Callable[..., list[str]]:
    def command(arm: Arm, devices: int | str) -> list[str]:
        arm.path.mkdir(exist_ok=True)
        (arm.path / "config.yaml").write_text(config.to_text(arm.config))
        return [sys.executable, "-c", program, str(arm.path)]

    return command


def test_arms_train_side_by_side_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arm, "command", stand_in(FINISHES))
    arms, watcher = small_arms(tmp_path), patient()
    train_all(arms, watcher, jobs=2)
    assert all(arm.run.finished for arm in arms)
    assert watcher.notes == ["2 arms, 2 at a time"]


def test_ctrl_c_asks_all_processes_to_save_and_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arm, "command", stand_in(WAITS))
    arms = small_arms(tmp_path)
    stop = Impatient(lambda: all((arm.path / "ready").exists() for arm in arms))
    with pytest.raises(run.Interrupted, match=r"stopped in seed-0, seed-5; everything is saved"):
        train_all(arms, stop, jobs=2)
    assert all((arm.path / "saved").exists() for arm in arms)


def test_an_arm_that_failed_beside_others_is_tried_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arm, "command", stand_in("raise SystemExit(1)"))
    alone: list[str] = []
    monkeypatch.setattr(Arm, "train", lambda arm, *_: alone.append(arm.name))
    train_all(small_arms(tmp_path), patient(), jobs=2)
    assert alone == ["seed-0", "seed-5"]


def test_the_command_of_an_arm_trains_what_the_arm_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = begun(monkeypatch)
    arms = figure1.arms(Request(tmp_path, 4, 1000))
    for arm in arms:
        cli(*arm.command("1")[3:])
    assert wanted == [arm.config for arm in arms]
    pretend(arms[0], [[0.5] * 3] * 4)
    assert arms[0].command("all")[3:] == ["resume", str(arms[0].path), "--devices=all"]
