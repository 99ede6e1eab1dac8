"""A test split, and what is measured of predictions on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core.data.on_bad import OnBad
from gmeta.experiment.baselines.task_rows import Tasks
from gmeta.experiment.measurement import cold_start
from gmeta.experiment.measurement.answer_metrics import click_metrics, number_metrics
from gmeta.experiment.measurement.attribute_reader import AttributeReader
from gmeta.experiment.measurement.baseline_rows import as_logits, read_tasks
from gmeta.experiment.measurement.cold_start import Floats, QueryRows
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.task_sets import measured_tasks
from gmeta.experiment.results.bootstrap import Bootstrap, compare
from gmeta.experiment.results.metrics import OF_ORDER, rating_metrics

Results = dict[int, dict[str, list[float]]]
"""Inner steps -> metric -> one value per seed."""

EVERYTHING = (0, 1)  # ranks divide the predictions, not the tasks


def yes_from(config: ExperimentConfig) -> float | None:
    """Return the label from which on a row counts as 1, or None if the experiment doesn't predict a rate."""
    return config.positive if config.own_columns and config.loss != "mse" else None


@dataclass
class Split:
    """A split's tasks, and the results that methods and baselines reach on them.

    Attributes:
      config: The experiment.
      batches: The batches that methods take.
      rows: The query rows.
      tasks: The same tasks as baselines take them.
      results: Method or baseline -> steps -> metric -> one value per seed.
    """

    config: ExperimentConfig
    batches: Sequence[Mapping[str, Any]]
    rows: QueryRows
    tasks: Tasks
    results: dict[str, Results] = field(default_factory=dict)
    _errors: dict[tuple[str, int], dict[str, list[Floats]]] = field(default_factory=dict)

    @classmethod
    def read(
        cls, config: ExperimentConfig, data: Path, name: str, on_bad: OnBad, reader: AttributeReader
    ) -> Split:
        """Read the whole split, items by their ids; every rank reads all of it."""
        batches = list(reader.watch(measured_tasks(config, data, name, on_bad, shard=EVERYTHING)))
        tasks = read_tasks(batches, config.item, yes_from(config))
        return cls(config, batches, cold_start.query_rows(batches), tasks)

    def add(self, name: str, steps: int, predictions: Floats) -> None:
        """Measure one seed's predictions, and keep the errors of each task."""
        found = self.results.setdefault(name, {}).setdefault(steps, {})
        for metric, value in self.measure(predictions).items():
            found.setdefault(metric, []).append(value)
        kept = self._errors.setdefault((name, steps), {})
        for metric, sums in self._task_errors(predictions).items():
            kept.setdefault(metric, []).append(sums)

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
        errors = {
            cell: {metric: np.stack(sums) for metric, sums in found.items()}
            for cell, found in self._errors.items()
        }
        methods = {cell: found for cell, found in errors.items() if cell[0] not in baselines and found}
        if not methods:
            return None
        return compare(methods, {name: errors[name, 0] for name in baselines}, np.diff(self.rows.row_splits))

    def _task_errors(self, predictions: Floats) -> dict[str, Floats]:
        """Sum the errors of each task's rows, metric -> (tasks,); none if only their order is measured."""
        if self.config.loss == "mse":
            off = predictions - self.rows.labels
            rows = {"mae": np.abs(off), "rmse": np.square(off)}
        elif self.config.own_columns:
            yes = self.rows.labels >= self.config.positive
            rows = {"logloss": np.logaddexp(0.0, np.where(yes, -predictions, predictions))}
        else:
            return {}
        task = np.repeat(np.arange(len(self.tasks)), np.diff(self.rows.row_splits))
        tasks = len(self.tasks)
        return {name: np.bincount(task, each, tasks).astype(np.float64) for name, each in rows.items()}
