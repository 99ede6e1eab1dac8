"""Output of ``gmeta prepare``: progress bars while it works, and a table of the results."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import ProgressColumn, Task, TaskID
from rich.table import Table
from rich.text import Text

from gmeta.core.bars import Bars
from gmeta.preprocess import PrepareSummary
from gmeta.preprocess.progress import STAGES

_COLUMNS = 8  # the most columns of a kind that the table names


class _Rate(ProgressColumn):
    """Column with the rows per second over the stage so far."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} rows/s" if speed else "")


class _TimeLeft(ProgressColumn):
    """Column with the time that the stage still needs, or, once it is over, has taken."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"in {_duration(task.finished_time or 0.0)}")
        left = task.time_remaining
        return Text("" if left is None else f"{_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class PrepareProgress(Bars):
    """One progress bar per stage on standard error; without a terminal, one line at the end of each stage.

    Callers use it as a `gmeta.preprocess.progress.Progress`.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(_Rate(), _TimeLeft(), console=console)
        self._stages: dict[str, tuple[TaskID, float]] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Move the stage's bar."""
        if stage not in self._stages:
            self._stages[stage] = self.bars.add_task(STAGES[stage], total=total), time.monotonic()
        bar, started = self._stages[stage]
        self.bars.update(bar, completed=done, total=total)
        if done == total and not self.drawn:
            seconds = time.monotonic() - started
            self.say(f"{STAGES[stage]}: {total:,} rows in {seconds:.1f} s")


def print_summary(summary: PrepareSummary, console: Console | None = None) -> None:
    """Print what was kept and what was left out, with the first bad records by name."""
    console = console or Console()
    console.print(_table(summary))
    least, _, median, _, most = summary.size_quantiles()
    console.print(f"rows a task: {least:,} to {most:,}, median {median:,}", highlight=False)
    for note in summary.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    for kind in summary.bad:
        for example in kind.examples:
            console.print(f"skipped: {example}", highlight=False, markup=False, soft_wrap=True)
        if kind.count > len(kind.examples):
            more = kind.count - len(kind.examples)
            console.print(
                f"skipped: {more:,} more in {kind.file}: {kind.reason}", highlight=False, markup=False
            )
    if summary.reused:
        text = f"already prepared, from the same files with the same settings: {summary.out}"
    else:
        text = f"prepared in {summary.seconds:.1f} s: {summary.out}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(summary: PrepareSummary) -> Table:
    table = Table(
        title=f"{summary.source}: {summary.rows_read:,} rows",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("tasks", justify="right")
    table.add_column("rows", justify="right")
    for name, split in summary.splits.items():
        table.add_row(name, f"{split.tasks:,}", f"{split.rows:,}")
    of_all = f" of {summary.rows_read:,}"
    for entry in summary.left_out:
        table.add_row(f"left out: {entry.reason}", f"{entry.tasks:,}", f"{entry.rows:,}{of_all}")
    for kind in summary.bad:
        count = f"{kind.count:,}{of_all if kind.of_rows else ''}"
        table.add_row(f"bad: {kind.reason} ({kind.file})", "", count)
    for what, names in (("hashed", summary.columns_hashed), ("left out", summary.columns_left_out)):
        if names:
            shown = ", ".join(names[:_COLUMNS]) + (", ..." if len(names) > _COLUMNS else "")
            table.add_row(f"{what}: {escape(shown)}", "", f"{len(names):,} of {summary.columns:,} columns")
    return table
