"""Train the arms of an experiment: one directory with one run per arm.

Finished arms are skipped and stopped arms are resumed, so repeating a command always continues it.
A refusal that counts as a result is kept in the arm's `refused.txt`.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions
from pevdn.errors import Interrupted, UsageError
from pevdn.storage.files import whole_lines, write_atomically
from pevdn.storage.signals import stop_requests
from pevdn.storage.strict_json import from_json
from pevdn.training import directory
from pevdn.training import loop as runs
from pevdn.training.directory import Run
from pevdn.training.loop import MessageRefused
from pevdn.training.progress import Moment, Observer

REFUSED = "refused.txt"


@dataclass(frozen=True)
class Arm:
    """One run of an experiment and its directory."""

    name: str
    config: Config
    path: Path
    options: RuntimeOptions = RuntimeOptions()

    @property
    def run(self) -> Run:
        return Run(self.path)

    @property
    def begun(self) -> bool:
        return (self.path / "config.yaml").exists()

    @property
    def refused(self) -> str | None:
        """Return why training was refused, if it was."""
        file = self.path / REFUSED
        return file.read_text() if file.exists() else None

    @property
    def over(self) -> bool:
        return self.run.finished or self.refused is not None

    def check(self) -> None:
        """Raise a UsageError if the directory holds anything but this run, with enough seeds."""
        if not self.begun:
            directory.refuse_taken(self.path)
            return
        stored, requested = (_flat(config) for config in (self.run.config, self.config))
        stored["seeds"] = min(stored["seeds"], requested["seeds"])
        if requested["randomness"] == "auto":  # was resolved when the run began
            del requested["randomness"]
        different = [name for name in requested if stored[name] != requested[name]]
        if different:
            first = (f"{n}={stored[n]} (requested: {requested[n]})" for n in different[:3])
            more = f" and {len(different) - 3} more" if len(different) > 3 else ""
            raise UsageError(
                f"{self.path} holds a run with {', '.join(first)}{more}; repeat the command with "
                "the same options as before, or choose another --out."
            )

    def train(self, observer: Observer, devices: int | str) -> None:
        """Start or resume training."""
        if self.begun:
            runs.resume(self.path, observer, devices=devices)
        else:
            options = self.options.replace({"devices": devices})
            runs.begin(self.config, self.path, observer, options)

    def command(self, devices: int | str) -> list[str]:
        """Return the command that does the same in a separate process."""
        pevdn = [sys.executable, "-m", "pevdn"]
        if self.begun:
            return [*pevdn, "resume", str(self.path), f"--devices={devices}"]
        c = self.config
        settings = dataclasses.asdict(c.settings).items()
        options = dataclasses.asdict(self.options.replace({"devices": devices})).items()
        return [
            *(*pevdn, "train", c.algorithm, f"--env={c.env}", f"--steps={c.steps}"),
            *(f"--seeds={c.seeds}", f"--seed={c.seed}"),
            *(f"--{name.replace('_', '-')}={value}" for name, value in options),
            *(f"--out={self.path}", *(f"--set={name}={value}" for name, value in settings)),
        ]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the metrics of the requested seeds."""
        last = self.config.seed + self.config.seeds
        return [line for line in self.run.metrics if line["seed"] < last]

    @property
    def steps(self) -> int:
        """Return the environment steps made so far, per seed."""
        if self.over:
            return self.config.steps
        lines = whole_lines(self.path / "metrics.jsonl")
        steps = int(from_json(lines[-1])["env_steps"]) if lines else 0
        return min(steps, self.config.steps)


def _flat(config: Config) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    settings = fields.pop("settings")
    return {**fields, **settings}


def train_all(
    arms: Sequence[Arm],
    observer: Observer,
    devices: int | str = 1,
    jobs: int = 1,
    may_refuse: bool = False,
) -> None:
    """Train every unfinished arm, one after the other or `jobs` at a time.

    With `may_refuse`, a message that does not fit is the arm's result instead of an error.
    """
    for arm in arms:
        arm.check()
    todo = [arm for arm in arms if not arm.over]
    if len(todo) < len(arms):
        observer.note(f"{len(arms) - len(todo)} of {len(arms)} arms are already finished.")
    if jobs > 1 and len(todo) > 1:
        _side_by_side(arms, todo, observer, devices, jobs)
    overall = _Overall(arms, observer)
    for arm in todo:
        if arm.over:
            continue
        overall.turn_to(arm)
        try:
            arm.train(overall, devices)
        except Interrupted:
            raise _stopped(f"{arm.name}, {overall.place}") from None
        except MessageRefused as reason:
            if not may_refuse:
                raise
            write_atomically(arm.path / REFUSED, str(reason))
            observer.note(f"{arm.name}: {reason}")


def _stopped(where: str) -> Interrupted:
    return Interrupted(f"stopped in {where}; everything is saved, repeat the command to continue.")


class _Clock:
    """Estimates the remaining time of all arms from the steps made since it started."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.total = sum(arm.config.steps for arm in arms)
        self.first = sum(arm.steps for arm in arms)
        self.began = time.monotonic()
        self.starting: list[float] = []  # seconds from start to first step, by arm

    def left(self, steps: int, to_start: int = 0) -> str:
        """Return the estimate after `steps` of all arms, with `to_start` arms not yet started."""
        starting = sum(self.starting)
        made, took = steps - self.first, time.monotonic() - self.began - starting
        if made <= 0:
            return ""
        seconds = (self.total - steps) * took / made
        minutes = (seconds + to_start * starting / max(1, len(self.starting))) / 60
        rest = f"{minutes / 60:.1f} h" if minutes >= 90 else f"{max(1, round(minutes))} min"
        return f"all arms: about {rest} left"


class _Overall:
    """Reports the progress of one arm together with that of all arms."""

    def __init__(self, arms: Sequence[Arm], inner: Observer) -> None:
        self.arms, self.inner = arms, inner
        self.clock = _Clock(arms)
        self.arm = arms[0]

    def turn_to(self, arm: Arm) -> None:
        self.arm, self.since = arm, time.monotonic()
        self.others = sum(other.steps for other in self.arms if other is not arm)
        self.to_start = sum(not other.over for other in self.arms) - 1

    @property
    def place(self) -> str:
        return f"arm {self.arms.index(self.arm) + 1} of {len(self.arms)}"

    def note(self, text: str) -> None:
        self.inner.note(text)

    def start(self, title: str, steps: int, done: int) -> None:
        self.clock.starting.append(time.monotonic() - self.since)
        self.inner.start(f"{self.place}, {self.arm.name}: {title}", steps, done)

    def moment(self, moment: Moment) -> None:
        left = self.clock.left(self.others + moment.steps, self.to_start)
        self.inner.moment(dataclasses.replace(moment, overall=left))

    def stop(self) -> None:
        self.inner.stop()


# ---- several at a time --------------------------------------------------------------------------


def _side_by_side(
    arms: Sequence[Arm], todo: Sequence[Arm], observer: Observer, devices: int | str, jobs: int
) -> None:
    """Train each arm in a separate process, whose output goes to ARM.log beside its directory.

    A failed arm is left unfinished; the caller then trains it in this process and sees its error.
    """
    waiting, working = list(todo), dict[Arm, subprocess.Popen[bytes]]()
    clock, shown = _Clock(arms), -1
    observer.start(f"{len(todo)} arms, {jobs} at a time", clock.total, clock.first)
    with stop_requests() as stop:
        try:
            while (waiting or working) and not stop:
                while waiting and len(working) < jobs:
                    arm = waiting.pop(0)
                    working[arm] = _start(arm, devices)
                time.sleep(0.5)
                working = {arm: p for arm, p in working.items() if p.poll() is None}
                steps = sum(arm.steps for arm in arms)
                rate = (steps - clock.first) / (time.monotonic() - clock.began)
                news: dict[str, float] | None = {} if steps != shown else None
                overall = " · ".join(filter(None, [clock.left(steps), *map(_standing, working)]))
                observer.moment(Moment(steps, rate, news, overall))
                shown = steps
        finally:
            observer.stop()
            for process in working.values():
                process.terminate()  # requests a checkpoint and exit
            for process in working.values():
                process.wait()
    if stop:
        raise _stopped(", ".join(arm.name for arm in working) or "no arm")


def _start(arm: Arm, devices: int | str) -> subprocess.Popen[bytes]:
    source = str(Path(runs.__file__).parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    # Processes share the GPU unless the user configured preallocation.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "PYTHONPATH": path}
    arm.path.parent.mkdir(parents=True, exist_ok=True)
    with arm.path.with_name(f"{arm.name}.log").open("ab") as log:
        return subprocess.Popen(
            arm.command(devices),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            process_group=0,  # keep Ctrl-C from children: a second signal would skip saving
        )


def _standing(arm: Arm) -> str:
    """Return `vdn 0.85`: the newest win rate, mean over seeds."""
    lines = arm.run.metrics[-arm.config.seeds :]
    if not lines:
        return f"{arm.name} …"
    return f"{arm.name} {sum(line['win_rate'] for line in lines) / len(lines):.2f}"
