"""The results of a run on rows: sentences, tables, JSON, and a report of one HTML file."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gmeta.core.files import write_atomically
from gmeta.core.settings import to_mapping
from gmeta.core.terminal import Rows, method_table
from gmeta.experiment.plan.drawn_negatives import describe
from gmeta.experiment.ranking.baselines import MEAN
from gmeta.experiment.ranking.measured import Results, calibration

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "gmeta-ranking-evaluation"
_TITLES = {
    "logloss": "log loss",
    "auc": "AUC",
    "gauc": "GAUC",
    "ece": "ECE",
    "ratio": "ratio",
    "mae": "MAE",
    "rmse": "RMSE",
}
_HIGHER = ("auc", "gauc")


def headline(results: Results) -> list[str]:
    """Describe the outcome in sentences; the first one states whether a method wins."""
    trained = results.trained
    method, baseline = results.strongest
    if method is None:
        return [f"The strongest baseline is {trained.label(baseline)}; no method was trained."]
    parts, found = [], results.difference
    for metric in next(iter(results.metrics.values()))[0]:
        if metric not in ("ece", "ratio"):
            ours, theirs = (results.mean(name, metric)[0] for name in (method, baseline))
            parts.append(f"{_TITLES[metric]} {ours:.4f} against {theirs:.4f}")
    verb = "is level with"
    if found is not None:
        verb = "beats" if found.wins else "loses to" if found.loses else verb
        parts[0 if results.binary else 1] += (
            f", difference {found.difference:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
        )
    drawn = "users" if trained.config.user else "blocks of rows"
    negatives = trained.config.negatives
    return [
        f"{_capital(trained.label(method))} {verb} {trained.label(baseline)}, the strongest baseline: "
        f"{'; '.join(parts)}.",
        "Both are the best of their kind in validation. A method beats a baseline if the interval of 95%, by "
        f"a bootstrap over {drawn}, leaves out zero.",
        *([] if negatives is None else [describe(negatives)]),
    ]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def table(results: Results) -> tuple[list[str], Rows]:
    """Return the titles of the table's columns, and its lines: label, whether a part begins, and cells.

    Methods come first, then baselines, each from best to worst in validation. A cell has a text and whether
    it is the column's best to the digits shown.
    """
    trained, names = results.trained, results.order()
    first = {names[0], names[len(trained.methods)]}
    metrics = [*next(iter(results.metrics.values()))[0]]
    shown = {(name, metric): results.mean(name, metric) for name in names for metric in metrics}
    best = {}
    for metric in metrics:
        values = [shown[name, metric][0] for name in names if name != MEAN]
        if values and metric != "ratio":
            best[metric] = f"{(max if metric in _HIGHER else min)(values):.4f}"
    rows = []
    for name in names:
        cells = []
        for metric in metrics:
            value, spread = shown[name, metric]
            text = f"{value:.4f}"
            marked = best.get(metric) == text and name != MEAN
            cells.append((text + ("" if spread is None else f"±{spread:.4f}"), marked))
        rows.append((trained.label(name), name in first, cells))
    return [_TITLES[metric] for metric in metrics], rows


def about(results: Results) -> str:
    """Describe the measurement: the label, the test rows, and the protocol."""
    trained = results.trained
    return f"{trained.config.label}, {len(trained.parts.test):,} rows, protocol {trained.config.protocol}"


def rich_table(results: Results) -> Table:
    """Build the table for a terminal of 80 columns."""
    header, rows = table(results)
    several = max(map(len, results.metrics.values())) > 1
    kept = [name for name in header if not (several and name in ("ECE", "ratio"))]
    return method_table(about(results), header, rows, kept)


def to_json(results: Results) -> dict[str, Any]:
    """Return all results as JSON values."""
    trained, found = results.trained, results.difference
    return {
        "format": FORMAT,
        "version": 1,
        "headline": headline(results),
        "strongest": dict(zip(("method", "baseline"), results.strongest, strict=True)),
        "validation": {name: round(value, 6) for name, value in trained.validation.items()},
        "described": dict(trained.described),
        "results": results.metrics,
        "difference": None if found is None else [found.difference, found.low, found.high],
        "groups": {
            title: {"groups": names, **{trained.label(name): values for name, values in own.items()}}
            for title, (names, own) in results.groups().items()
        },
        "rows": {name: len(getattr(trained.parts, name)) for name in ("train", "validation", "test")},
        "experiment": to_mapping(trained.config),
    }


def write_report(results: Results, folder: Path) -> Path:
    """Write ``report.html``, ``evaluation.json`` and ``figures/*.png`` into a run's folder.

    Returns:
      The path of the page.

    Raises:
      OSError: The folder can't be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from gmeta.experiment.report.page import FIGURES, FILE_NAME, flatten

    trained, parts = results.trained, results.trained.parts
    drawings = []
    for name, heading, caption, figure in _figures(results):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        write_atomically(folder / FIGURES / f"{name}.png", buffer.getvalue())
        drawings.append((name, heading, caption, base64.b64encode(buffer.getvalue()).decode("ascii")))
    write_atomically(folder / "evaluation.json", json.dumps(to_json(results), indent=1) + "\n")
    descriptions = [
        (trained.label(name), f"{_capital(text)}.") for name, text in sorted(trained.described.items())
    ]
    loader = PackageLoader("gmeta.experiment.report", ".")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    legend = "Methods, then baselines, each in the order of validation, by which their settings are chosen. "
    if results.binary:
        legend += (
            "All are calibrated on validation. GAUC: a user's own AUC, mean weighted by rows. ECE: the mean "
            "distance of predicted from observed rates in ten parts of equal size. Ratio: the mean "
            "probability over the rate of ones."
        )
    else:
        legend += "All are calibrated on validation. MAE and RMSE are in the label's own unit."
    text = page.get_template("next_item.html.j2").render(
        title=f"Ranking by {trained.config.label}",
        about=(
            f"trained on {len(parts.train):,} rows, evaluated on {len(parts.test):,}, protocol "
            f"{trained.config.protocol}"
        ),
        headline=headline(results),
        tables=[("The test", *table(results))],
        legend=legend,
        descriptions=descriptions,
        drawings=drawings,
        users=[],
        settings=flatten(to_mapping(trained.config)),
    )
    return write_atomically(folder / FILE_NAME, text)


def _figures(results: Results) -> list[tuple[str, str, str, Any]]:
    """Draw the figures: name, heading, caption, figure."""
    found = [_learning(results), *([_calibration(results)] if results.binary else []), *_groups(results)]
    return [each for each in found if each is not None]


def _learning(results: Results) -> tuple[str, str, str, Any] | None:
    from gmeta.experiment.report.style import MARKERS, PALETTE, canvas, label_lines, whole_numbers

    trained = results.trained
    curves = {
        name: seeds for name, seeds in results.epochs.items() if any(len(each) > 1 for each in seeds.values())
    }
    if not curves:
        return None
    longest = max((trained.label(name) for name in curves), key=len)
    unit = "Log loss" if results.binary else "Squared error, in units of the labels' variance,"
    heading = f"{unit} in validation after each epoch"
    figure, (axes,) = canvas(
        heading, "the best epoch of each run is what the table measures", 3.6, label=longest
    )
    labels = []
    for number, (name, seeds) in enumerate(curves.items()):
        colour = PALETTE[number % len(PALETTE)]
        for values in seeds.values():
            axes.plot(np.arange(1, len(values) + 1), values, color=colour, linewidth=1.6)
            best = int(np.argmin(values))
            axes.plot(best + 1, values[best], MARKERS[number % len(MARKERS)], color=colour)
        labels.append((trained.label(name), colour, next(iter(seeds.values()))[-1]))
    whole_numbers(axes)
    axes.set_xlabel("epoch")
    label_lines(axes, labels)
    return "learning", heading, "A marker is at the best epoch of a run.", figure


def _calibration(results: Results) -> tuple[str, str, str, Any]:
    from gmeta.experiment.report.style import BASELINES, MARKERS, MUTED, PALETTE, canvas, label_lines

    trained, labels = results.trained, results.trained.parts.test.labels
    names = [name for name in results.strongest if name is not None]
    longest = max((trained.label(name) for name in names), key=len)
    heading = "Predicted and observed rates"
    figure, (axes,) = canvas(heading, "in ten parts of the test of equal size", 3.6, label=longest)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=":")
    written = []
    for place, name in enumerate(names):
        own = name in trained.methods
        colour = PALETTE[0] if own else BASELINES[-1]
        said, happened = calibration(results.scores[name][0], labels)
        axes.plot(
            said,
            happened,
            color=colour,
            marker=MARKERS[place],
            linestyle="-" if own else "--",
            linewidth=1.6,
        )
        written.append((trained.label(name), colour, float(happened[-1])))
    axes.set_xlabel("mean predicted probability")
    label_lines(axes, written)
    caption = "The strongest method and the strongest baseline; the diagonal is ideal."
    return "calibration", heading, caption, figure


def _groups(results: Results) -> list[tuple[str, str, str, Any]]:
    from gmeta.experiment.report.style import draw_groups

    trained, drawn = results.trained, []
    for title, (spans, found) in results.groups().items():
        heading = f"{'Log loss' if results.binary else 'RMSE'} {title}"
        lines = [(trained.label(name), name in trained.methods, values) for name, values in found.items()]
        figure = draw_groups(heading, "in quarters of the test's rows", spans, lines)
        caption = "Methods, and the two strongest baselines (dashed)."
        drawn.append((f"by_{title.rpartition(' ')[2]}", heading, caption, figure))
    return drawn
