"""Progress of the commands, on standard error: bars on a terminal, elsewhere a line now and then for counts."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Count = Callable[[int, "int | None"], None]
StageProgress = Callable[[str, int, "int | None"], None]


LINE_SECONDS = 5.0
"""Seconds between two lines where standard error is no terminal."""


class _Speed(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} {self.unit}/s" if task.speed else "")


def bar(*columns: ProgressColumn, width: int = 0, transient: bool = True) -> Progress:
    """A rich display: title, bar, count, `columns`, time left."""
    console = Console(stderr=True)
    title = TextColumn(f"{{task.description:>{width}}}" if width else "{task.description}")
    shown = (title, BarColumn(), MofNCompleteColumn(), *columns, TimeRemainingColumn())
    return Progress(*shown, console=console, disable=not console.is_terminal, transient=transient)


def _lines(title: str, unit: str) -> Count:
    """Prints a line every `LINE_SECONDS`, the first after as long: a short run prints none."""
    last = time.monotonic()

    def report(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            of = "" if total is None else f" of {total}"
            print(f"{title}: {done}{of} {unit}".rstrip(), file=sys.stderr, flush=True)

    return report


@contextmanager
def count_progress(title: str, unit: str = "") -> Iterator[Count]:
    """One bar, with the speed in `unit` where one is named; call it with what is done and the total."""
    with bar(*([_Speed(unit)] if unit else [])) as display:
        if display.disable:
            yield _lines(title, unit)
            return
        task = display.add_task(title, total=None)
        yield lambda done, total: display.update(task, completed=done, total=total)


@contextmanager
def stage_progress() -> Iterator[StageProgress]:
    """A bar per stage."""
    with bar(width=13) as display:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = display.add_task(stage, total=total)
            display.update(tasks[stage], completed=done, total=total)

        yield report


class TrainingProgress:
    """Step, loss, speed, time left and the last score of a training run (`seps.training.tracking.Progress`)."""

    def __init__(self) -> None:
        figures = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:.1f}/s")
        self._bar = bar(figures, TextColumn("{task.fields[note]}"), transient=False)
        self._speed = 0.0
        self._task = self._bar.add_task("training", start=False, loss=math.nan, speed=0.0, note="")

    def start(self, step: int, total: int) -> None:
        self._bar.update(self._task, total=total, completed=step)
        self._bar.start_task(self._task)
        self._bar.start()

    def update(self, step: int, loss: float, samples_per_second: float) -> None:
        # Smoothed, else the figure jumps with every step.
        self._speed = 0.9 * self._speed + 0.1 * samples_per_second if self._speed else samples_per_second
        self._bar.update(self._task, completed=step, loss=loss, speed=self._speed)

    def note(self, text: str) -> None:
        self._bar.update(self._task, note=text)

    def stop(self) -> None:
        self._bar.stop()


def training_progress() -> TrainingProgress | None:
    """A bar for `train`, None where standard error is no terminal."""
    return TrainingProgress() if sys.stderr.isatty() else None
