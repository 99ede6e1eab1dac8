"""A test split: what methods and baselines predict on it, and what is measured of these predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gmeta.experiment.measurement.answer_metrics import click_metrics, number_metrics
from gmeta.experiment.measurement.baseline_rows import as_logits
from gmeta.experiment.measurement.cold_start import Floats, QueryRows
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.results.bootstrap import Bootstrap, Cell, compare
from gmeta.experiment.results.calibration import Calibration
from gmeta.experiment.results.metrics import OF_ORDER, rating_metrics

Results = dict[int, dict[str, list[float]]]
"""Inner steps -> metric -> one value per seed."""

EVERYTHING = (0, 1)  # ranks divide the predictions, not the tasks


def yes_from(config: ExperimentConfig) -> float | None:
    """Return the label from which on a row counts as 1, or None if the experiment doesn't predict a rate."""
    return config.positive if config.own_columns and config.loss != "mse" else None


@dataclass
class Split:
    """The query rows of a split's tasks, and what is predicted for them.

    Attributes:
      config: The experiment.
      rows: The query rows.
      predictions: Method or baseline, and steps -> for each seed (rows,). A baseline has 0 steps.
      limited: Method or baseline, and how many support rows a task may use -> for each seed (rows,).
      varied: Method or baseline that knows its variances -> for each seed predictions and variances, (rows,).
    """

    config: ExperimentConfig
    rows: QueryRows
    predictions: dict[Cell, list[Floats]] = field(default_factory=dict)
    limited: dict[Cell, list[Floats]] = field(default_factory=dict)
    varied: dict[str, list[tuple[Floats, Floats]]] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence[Split]) -> Split:
        """Join splits of several runs to one that has all of their rows, in the order of ``parts``.

        The runs have the same settings. A seed's predictions are those of this seed in each run.
        """
        first = parts[0]

        def joined(columns: Sequence[Sequence[Floats]]) -> list[Floats]:  # part -> seed -> rows
            return [np.concatenate(each) for each in zip(*columns, strict=True)]

        return cls(
            first.config,
            QueryRows.join([part.rows for part in parts]),
            {cell: joined([part.predictions[cell] for part in parts]) for cell in first.predictions},
            {cell: joined([part.limited[cell] for part in parts]) for cell in first.limited},
            {
                name: [
                    (np.concatenate(means), np.concatenate(variances))
                    for means, variances in (
                        zip(*of_seed, strict=True)
                        for of_seed in zip(*(part.varied[name] for part in parts), strict=True)
                    )
                ]
                for name in first.varied
            },
        )

    def add(self, name: str, steps: int, predictions: Floats) -> None:
        """Keep one seed's predictions."""
        self.predictions.setdefault((name, steps), []).append(predictions)

    def results(self) -> dict[str, Results]:
        """Measure all predictions, method or baseline -> results."""
        found: dict[str, Results] = {}
        for (name, steps), seeds in self.predictions.items():
            metrics = [self.measure(each) for each in seeds]
            found.setdefault(name, {})[steps] = {key: [each[key] for each in metrics] for key in metrics[0]}
        return found

    def support_curve(self) -> dict[str, dict[int, list[float]]]:
        """Measure predictions from few support rows, method or baseline -> rows -> MAE per seed."""
        found: dict[str, dict[int, list[float]]] = {}
        for (name, size), seeds in self.limited.items():
            found.setdefault(name, {})[size] = [self.measure(each)["mae"] for each in seeds]
        return found

    def calibration(self) -> dict[str, Calibration]:
        """Compare variances with errors, method or baseline -> how they compare."""
        return {
            name: Calibration.of(self.rows.labels, *map(list, zip(*seeds, strict=True)))
            for name, seeds in self.varied.items()
        }

    def measure(self, predictions: Floats) -> dict[str, float]:
        """Compute the metrics of a network's outputs; the outputs are logits where labels are binary."""
        labels, splits, ratings = self.rows.labels, self.rows.row_splits, not self.config.own_columns
        if self.config.loss == "mse":
            return (
                rating_metrics(labels, predictions, splits)
                if ratings
                else number_metrics(labels, predictions)
            )
        if ratings:
            found = rating_metrics(labels, predictions, splits)
            return {name: found[name] for name in OF_ORDER}
        return click_metrics(labels, predictions, splits, self.config.positive)

    def outputs(self, predictions: Floats) -> Floats:
        """Return a baseline's predictions in the unit of a network's outputs."""
        return predictions if yes_from(self.config) is None else as_logits(predictions)

    def bootstrap(self, baselines: Sequence[str]) -> Bootstrap | None:
        """Compare each method with each baseline; None where rows have no error of their own."""
        errors = {cell: self._task_errors(seeds) for cell, seeds in self.predictions.items()}
        methods = {cell: found for cell, found in errors.items() if cell[0] not in baselines and found}
        if not methods:
            return None
        return compare(methods, {name: errors[name, 0] for name in baselines}, np.diff(self.rows.row_splits))

    def _task_errors(self, seeds: Sequence[Floats]) -> dict[str, Floats]:
        """Sum the errors of each task's rows, metric -> (seeds, tasks); none if only order is measured."""
        predictions = np.stack(seeds)
        if self.config.loss == "mse":
            off = predictions - self.rows.labels
            rows = {"mae": np.abs(off), "rmse": np.square(off)}
        elif self.config.own_columns:
            yes = self.rows.labels >= self.config.positive
            rows = {"logloss": np.logaddexp(0.0, np.where(yes, -predictions, predictions))}
        else:
            return {}
        sizes = np.diff(self.rows.row_splits)
        task = np.repeat(np.arange(len(sizes)), sizes)
        return {
            name: np.stack([np.bincount(task, each, len(sizes)) for each in errors])
            for name, errors in rows.items()
        }
