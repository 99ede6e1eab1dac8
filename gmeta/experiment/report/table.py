"""The cold-start table: one row per method and number of steps, one column per metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.metrics import METRICS

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Cell:
    """A table cell: mean and spread as text, and whether the mean is the column's best as displayed."""

    mean: str
    spread: str
    best: bool


@dataclass(frozen=True)
class Row:
    """A line of the table; ``steps`` is empty for a method without steps, ``first`` marks its first line."""

    label: str
    steps: str
    first: bool
    cells: tuple[Cell, ...]


def header(evaluation: Evaluation) -> list[str]:
    """Return the metrics' column titles, with an arrow for the better direction: ``"MAE ↓"``."""
    arrows = {"lower": "↓", "higher": "↑"}
    return [f"{METRICS[name].label} {arrows[METRICS[name].better]}" for name in evaluation.metrics]


def rows(evaluation: Evaluation) -> list[Row]:
    """Return the table's lines, ordered by method and, within a method, by steps."""
    best = {metric: _best_mean(evaluation, metric) for metric in evaluation.metrics}
    lines = []
    for name, method in evaluation.methods.items():
        for position, steps in enumerate(sorted(method.results)):
            cells = []
            for metric in best:
                mean, spread = evaluation.spread(name, steps, metric).parts()
                cells.append(Cell(mean, spread, best=mean == best[metric]))
            lines.append(
                Row(method.label, str(steps) if method.adapts else "", position == 0, tuple(cells)),
            )
    return lines


def _best_mean(evaluation: Evaluation, metric: str) -> str | None:
    cell = evaluation.best(metric)
    return None if cell is None else evaluation.spread(*cell, metric).parts()[0]


def legend(evaluation: Evaluation) -> str:
    """Describe the table's numbers: the tasks they cover, and how the spread is computed."""
    seeds = len(evaluation.seeds)
    over = "one seed" if seeds == 1 else f"{seeds} seeds: mean ± sample standard deviation"
    return f"{evaluation.data.cold_tasks:,} {evaluation.data.split} tasks, {over}"


def rich_table(evaluation: Evaluation) -> Table:
    """Build the table for a terminal of 80 columns; the best value of each column is bold and starred.

    The star is for terminals and logs that show no bold.

    Example:
      >>> from rich.console import Console
      >>> Console().print(rich_table(evaluation))  # doctest: +SKIP
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{evaluation.title} ({evaluation.data.name}, {evaluation.data.split})",
        caption=f"{legend(evaluation)}; * best",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("method")
    table.add_column("steps", justify="right", no_wrap=True)
    for title in header(evaluation):
        table.add_column(f"{title} ", justify="right", no_wrap=True)
    for row in rows(evaluation):
        if row.first and table.rows:
            table.add_section()
        cells = []
        for cell in row.cells:
            text = Text(cell.mean, "bold green" if cell.best else "")
            text.append(cell.spread, "" if cell.best else "dim")
            cells.append(text.append("*" if cell.best else " "))
        table.add_row(Text(row.label if row.first else ""), row.steps, *cells)
    return table
