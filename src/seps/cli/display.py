"""Tables and progress bars that the commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from seps.cli.text import printable
from seps.retrieval.eval.evaluate import EvaluationReport

StageProgress = Callable[[str, int, int | None], None]


@contextmanager
def stage_progress() -> Iterator[StageProgress]:
    """A bar a stage on standard error; nothing where that is no terminal."""
    columns = (TextColumn("{task.description:>13}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def metrics_table(title: str, report: EvaluationReport) -> None:
    """Print both directions' recalls and ranks."""
    metrics = report.metrics
    table = Table(title=escape(printable(title)))
    for name in ("direction", "R@1", "R@5", "R@10", "median rank", "mean rank"):
        table.add_column(name, justify="left" if name == "direction" else "right")
    for name, side in (("image -> text", metrics.i2t), ("text -> image", metrics.t2i)):
        values = (side.r1, side.r5, side.r10, side.median_rank, side.mean_rank)
        table.add_row(name, *(f"{value:.1f}" for value in values))
    console = Console()
    console.print(table)
    described = f", {report.images_with_description} with a description" if report.images_with_description else ""
    console.print(
        f"rSum [bold]{metrics.rsum:.1f}[/]   {metrics.images} images{described}, {metrics.captions} captions, "
        f"protocol [bold]{report.protocol}[/]"
    )
