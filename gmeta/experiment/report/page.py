"""The report of an evaluation: one HTML file that opens offline, and a PNG of each figure beside it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmeta.core.files import write_atomically
from gmeta.experiment.report.figures import reliability_rows
from gmeta.experiment.report.findings import headline, standings
from gmeta.experiment.results.evaluation import LEVELS, Evaluation
from gmeta.experiment.results.metrics import ERRORS, METRICS, Comparison

if TYPE_CHECKING:
    from rich.table import Table

    from gmeta.core.terminal import Rows

# The table of differences between methods and baselines, with their intervals.

_ALSO = ("rmse",)  # errors that are compared in addition to the deciding one


def difference_header(evaluation: Evaluation) -> list[str]:
    """Return the titles of the columns: the errors that are compared."""
    return [METRICS[metric].label for metric in _compared(evaluation)]


def difference_rows(evaluation: Evaluation) -> list[tuple[str, str, list[tuple[str, bool]]]]:
    """Return the table's lines: method, baseline, and each error's difference.

    Each method has its best number of steps, as in the report's sentences.

    Returns:
      Method with its steps, baseline, and for each error the difference with its interval as text, and
      whether it is a win.
    """
    bootstrap = evaluation.bootstrap
    if bootstrap is None:
        return []
    order = standings(evaluation, evaluation.error)
    lines = []
    for method in (standing for standing in order if standing.adapts):
        for baseline in (standing for standing in order if not standing.adapts):
            found = [
                bootstrap.find(method.method, method.steps, baseline.method, metric)
                for metric in _compared(evaluation)
            ]
            cells = [(_text(one), one.wins) if one else ("–", False) for one in found]
            lines.append((f"{method.label}{method.where}", baseline.label, cells))
    return lines


def _compared(evaluation: Evaluation) -> list[str]:
    return [metric for metric in evaluation.metrics if metric in (*ERRORS, *_ALSO)]


def _text(one: Comparison) -> str:
    return f"{one.difference:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


# The cold-start table: one row per method and number of steps, one column per metric.


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


@dataclass(frozen=True)
class Beside:
    """The outcome of a run for ranking, as shown in the report of a run for cold start.

    Attributes:
      about: What was measured.
      headline: The sentences of its report.
      header: The titles of its table's columns.
      rows: Its table's lines.
      page: The path of its report, relative to this one.
    """

    about: str
    headline: Sequence[str]
    header: Sequence[str]
    rows: Rows
    page: str


FILE_NAME, FIGURES = "report.html", "figures"


def write_report(evaluation: Evaluation, folder: Path, *, beside: Beside | None = None) -> Path:
    """Write ``report.html`` and ``figures/*.png`` into ``folder``.

    The page embeds its figures and loads nothing from the network, so it can be mailed or archived as a
    single file. If the evaluation has no data for a figure, the figure is left out, and its PNG from an
    earlier report in the same folder is removed. Each file is written whole or not at all, the page last.

    Args:
      evaluation: What to report.
      folder: The folder to write to; created if it doesn't exist.
      beside: The outcome of ranking on the same data; None: there is none.

    Returns:
      The path of the page.

    Raises:
      OSError: The folder can't be written.

    Example:
      >>> from gmeta.experiment.results.evaluation_json import load
      >>> write_report(load(Path("cold.json")), Path("report"))  # doctest: +SKIP
      PosixPath('report/report.html')
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from gmeta.experiment.report import figures

    drawings = figures.draw(evaluation)
    images = []
    for drawing in drawings:
        buffer = io.BytesIO()
        drawing.figure.savefig(buffer, format="png", metadata={"Software": None})
        write_atomically(folder / FIGURES / f"{drawing.name}.png", buffer.getvalue())
        images.append(base64.b64encode(buffer.getvalue()).decode("ascii"))
    for name in set(figures.NAMES) - {drawing.name for drawing in drawings}:
        (folder / FIGURES / f"{name}.png").unlink(missing_ok=True)

    loader = PackageLoader("gmeta.experiment.report", ".")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text = page.get_template("page.html.j2").render(
        evaluation=evaluation,
        headline=headline(evaluation),
        sections=[(one.data.split, header(one), rows(one), legend(one)) for one in evaluation.sections],
        metrics={METRICS[name].label: METRICS[name].description for name in evaluation.metrics},
        reliability=reliability_rows(evaluation),
        levels=LEVELS,
        compared=[
            (one.data.split, difference_header(one), difference_rows(one))
            for one in evaluation.sections
            if one.bootstrap
        ],
        drawings=list(zip(drawings, images, strict=True)),
        beside=beside,
        settings=flatten(evaluation.config),
    )
    return write_atomically(folder / FILE_NAME, text)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings: dotted name -> the value as JSON, except that strings have no quotes."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = (
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            )
    return flat
