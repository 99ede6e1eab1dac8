"""The results of a run on rows: predictions and their metrics, sentences, tables, JSON, and an HTML report.

The metrics are errors, order, calibration and groups of test rows.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gmeta.core.files import write_atomically
from gmeta.core.schema import OnBad
from gmeta.core.settings import to_mapping
from gmeta.core.terminal import Rows, method_table
from gmeta.experiment.baselines.task_rows import Floats, Ints
from gmeta.experiment.measurement.split import click_metrics, number_metrics
from gmeta.experiment.plan.experiment_config import describe_negatives
from gmeta.experiment.plan.next_item_config import BLEND
from gmeta.experiment.ranking import models
from gmeta.experiment.ranking.baselines import MEAN
from gmeta.experiment.ranking.runs import Trained, load_ranking, losses
from gmeta.experiment.results.metrics import Comparison, compare
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.runs.trainer import read_logged

if TYPE_CHECKING:
    from rich.table import Table

BINS = 10
"""So many parts of equal size, in the order of predictions, does a calibration have."""
_BLOCKS = 1000  # of rows, drawn by the bootstrap instead of users if rows have none


def calibration(scores: Floats, labels: Floats, bins: int = BINS) -> tuple[Floats, Floats]:
    """Compare probabilities with outcomes, in parts of equal size in the order of probabilities.

    Rows of equal probability share their rate, so that the order of rows has no influence.

    Args:
      scores: (rows,) logits.
      labels: (rows,) 0 or 1.
      bins: The number of parts.

    Returns:
      (parts,) the mean probability and (parts,) the rate of ones.

    Example:
      >>> calibration(np.array([0.0, 0.0]), np.array([1.0, 0.0]), bins=1)
      (array([0.5]), array([0.5]))
    """
    rates = 1 / (1 + np.exp(-scores))
    _, place, count = np.unique(rates, return_inverse=True, return_counts=True)
    labels = (np.bincount(place, weights=labels) / count)[place]
    parts = np.array_split(np.argsort(rates, kind="stable"), min(bins, len(rates)))
    means = [(rates[part].mean(), labels[part].mean()) for part in parts]
    said, happened = np.array(means).T
    return said, happened


@dataclass(frozen=True)
class Results:
    """The reported results of a run.

    Attributes:
      trained: The run.
      scores: Name -> seeds -> (rows,) logits, or labels, of test rows; a baseline has one seed.
      epochs: Method -> seed -> the loss in validation after each epoch.
    """

    trained: Trained
    scores: Mapping[str, Sequence[Floats]]
    epochs: Mapping[str, Mapping[int, Sequence[float]]]

    @property
    def binary(self) -> bool:
        """Whether labels are 0 and 1."""
        return self.trained.config.binary

    @cached_property
    def _by_user(self) -> tuple[Ints, Ints]:
        """Return the test rows user after user, and where each user's rows begin."""
        users = self.trained.parts.test.users
        order = np.argsort(users, kind="stable")
        sizes = np.unique(users, return_counts=True)[1]
        return order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def metrics(self) -> dict[str, list[dict[str, float]]]:
        """Name -> seed -> metric -> value."""
        return {name: [self.measure(each) for each in seeds] for name, seeds in self.scores.items()}

    def measure(self, scores: Floats) -> dict[str, float]:
        """Compute the metrics of scores of test rows.

        For labels 0 and 1: ``logloss``, ``auc``, ``gauc`` if rows have users, ``ece``, the mean distance of
        the parts of `calibration` from the diagonal, and, if there are ones, ``ratio``, the mean probability
        divided by the rate of ones. For other labels: ``mae`` and ``rmse``.
        """
        labels = self.trained.parts.test.labels
        if not self.binary:
            return number_metrics(labels, scores)
        order, splits = self._by_user
        found = click_metrics(labels[order], scores[order], splits, 1.0)
        if self.trained.config.user is None:
            del found["gauc"]
        said, happened = calibration(scores, labels)
        found["ece"] = float(np.abs(said - happened).mean())
        if happened.any():
            found["ratio"] = float(said.mean() / happened.mean())
        return found

    def mean(self, name: str, metric: str) -> tuple[float, float | None]:
        """Return a metric's mean over seeds, and its sample standard deviation if there are several."""
        values = [each[metric] for each in self.metrics[name]]
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None

    @property
    def error(self) -> str:
        """The metric by which methods are compared."""
        return "logloss" if self.binary else "rmse"

    @property
    def strongest(self) -> tuple[str | None, str]:
        """The method and the baseline that are best in validation; None without a method."""
        trained, by = self.trained, self.trained.validation
        methods = [name for name in by if name in trained.methods]
        return min(methods, key=by.__getitem__, default=None), min(trained.baselines, key=by.__getitem__)

    @cached_property
    def difference(self) -> Comparison | None:
        """The strongest method's error minus the strongest baseline's, with its bootstrap interval.

        The bootstrap draws users with all their rows; without users, blocks of rows.
        """
        method, baseline = self.strongest
        if method is None:
            return None
        parts = self.trained.parts
        if self.trained.config.user is None:
            group = np.arange(len(parts.test)) % min(_BLOCKS, len(parts.test))
        else:
            group = np.unique(parts.test.users, return_inverse=True)[1]
        unit = 1.0 if self.binary else parts.encoding.deviation**2

        def sums(name: str) -> dict[str, Floats]:
            every = [losses(each, parts.test.labels, parts.encoding) * unit for each in self.scores[name]]
            return {self.error: np.stack([np.bincount(group, weights=each) for each in every])}

        found = compare({(method, 0): sums(method)}, {baseline: sums(baseline)}, np.bincount(group))
        return found.find(method, 0, baseline, self.error)

    def order(self) -> list[str]:
        """Return all names: methods, then baselines, each from best to worst in validation."""
        trained, by = self.trained, self.trained.validation
        return [
            *sorted(trained.methods, key=by.__getitem__),
            *sorted(trained.baselines, key=by.__getitem__),
        ]

    def groups(self) -> dict[str, tuple[list[str], dict[str, list[float]]]]:
        """Return the error by group.

        Returns:
          Title -> the groups' names, and name of a method or baseline -> its log loss, or root mean squared
          error, in each group: by the number of training rows of a row's user, and of its item. Users and
          items without training rows are a separate group; the others are in quarters of the rows.
        """
        trained, parts = self.trained, self.trained.parts
        names = [name for name in self.order() if name in trained.methods]
        names += [name for name in self.order() if name in trained.baselines and name != MEAN][:2]
        found = {}
        for what, feature in (("user", trained.config.user), ("item", trained.config.item)):
            if feature is None:
                continue
            number = np.asarray(parts.test.ids[feature])
            counts = np.bincount(
                np.asarray(parts.train.ids[feature]), minlength=parts.encoding.sizes[feature]
            )
            often = np.where(number > 0, counts[number], 0)
            known = often[often > 0]
            bounds = np.unique(np.quantile(known, [0.25, 0.5, 0.75], method="higher")) if len(known) else []
            place = np.where(often > 0, 1 + np.searchsorted(bounds, often, side="left"), 0)
            present = np.unique(place)
            labels = [_span(often[place == part]) for part in present]
            values = {
                name: [self._error_of(self.scores[name], place == part) for part in present] for name in names
            }
            found[f"by the training rows of a row's {what}"] = labels, values
        return found

    def _error_of(self, seeds: Sequence[Floats], rows: Floats) -> float:
        labels, encoding = self.trained.parts.test.labels, self.trained.parts.encoding
        means = [float(losses(each[rows], labels[rows], encoding).mean()) for each in seeds]
        found = means if self.binary else encoding.deviation * np.sqrt(means)
        return float(np.mean(found))


def _span(values: Ints) -> str:
    low, high = int(values.min()), int(values.max())
    return ("none" if low == 0 else f"{low:,}") if low == high else f"{low:,} to {high:,}"


def evaluate_ranking(run: RunFolder, on_bad: OnBad = "raise") -> Results:
    """Measure a trained run.

    Raises:
      DataError: The run isn't fully trained.
    """
    trained = load_ranking(run, on_bad)
    test = trained.parts.test
    scores = {name: [each.scores(test) for each in seeds.values()] for name, seeds in trained.methods.items()}
    scores |= {name: [each.scores(test)] for name, each in trained.baselines.items()}
    epochs = {
        method: {
            seed: read_logged(run.training(method, seed), models.LOGGED) for seed in trained.config.seeds
        }
        for method in trained.methods
        if method != BLEND
    }
    return Results(trained, scores, epochs)


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
        *([] if negatives is None else [describe_negatives(negatives)]),
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
