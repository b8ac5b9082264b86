"""Progress of a training, shown on standard error."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass
class Moment:
    """A snapshot of the progress."""

    steps: int  # mean over seeds
    steps_per_second: float  # all seeds together, while training
    evaluated: dict[str, float] | None = None  # means over seeds of the newest evaluation
    overall: str = ""  # progress of the experiment that the run belongs to


class Reporter(Protocol):
    """Receives the progress of a training."""

    def note(self, text: str) -> None: ...
    def start(self, title: str, steps: int, done: int) -> None: ...
    def moment(self, moment: Moment) -> None: ...
    def stop(self) -> None: ...


class Silent:
    """Show nothing: the default in Python."""

    def note(self, text: str) -> None: ...
    def start(self, title: str, steps: int, done: int) -> None: ...
    def moment(self, moment: Moment) -> None: ...
    def stop(self) -> None: ...


def _figures(evaluated: dict[str, float] | None) -> str:
    if not evaluated:
        return ""
    text = f"win rate {evaluated['win_rate']:.2f}"
    for model in ("anchor", "average"):
        if evaluated.get(f"win_rate_{model}") is not None:
            text += f" ({model} {evaluated[f'win_rate_{model}']:.2f})"
    for observer in ("record", "team"):
        if f"epsilon_{observer}" in evaluated:
            return f"{text} · ε {observer} {evaluated[f'epsilon_{observer}']:.2f} so far"
    return text


class Plain:
    """Print one line per evaluation, for logs and pipes."""

    def __init__(self) -> None:
        self._shown: dict[str, float] | None = None
        self._total = 0

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def start(self, title: str, steps: int, done: int) -> None:
        self._total = steps
        self.note(f"{title}: {done:,} of {steps:,} steps")

    def moment(self, moment: Moment) -> None:
        if moment.evaluated is None or moment.evaluated is self._shown:
            return
        self._shown = moment.evaluated
        parts = (
            f"{moment.steps:>9,} of {self._total:,} steps",
            _figures(moment.evaluated),
            f"{moment.steps_per_second:,.0f} steps/s",
            moment.overall,
        )
        self.note(" · ".join(part for part in parts if part))

    def stop(self) -> None: ...


class Bar:
    """Draw a live progress bar of at most 80 columns: steps, speed, time left, win rate and ε."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._live: Any = None

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def start(self, title: str, steps: int, done: int) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        self._console.print(title, style="bold", highlight=False)
        self._bar = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            speed_estimate_period=60,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, speed="")
        self._figures = Text()
        self._live = Live(Group(self._bar, self._figures), console=self._console)
        self._live.start()

    def moment(self, moment: Moment) -> None:
        speed = f"{moment.steps_per_second:,.0f}/s" if moment.steps_per_second else ""
        self._bar.update(self._task, completed=moment.steps, speed=speed)
        lines = (_figures(moment.evaluated), moment.overall)
        self._figures.plain = "\n".join(line for line in lines if line)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()


def reporter() -> Reporter:
    """Return a progress bar on a terminal, else plain lines."""
    return Bar() if sys.stderr.isatty() else Plain()
