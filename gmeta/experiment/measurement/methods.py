"""Predictions of all methods of a trained experiment, and of baselines, on each of its test splits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.schema import OnBad
from gmeta.experiment.baselines.attributes import MOST_CHANGED, ItemAttributes, mark_rows
from gmeta.experiment.baselines.task_rows import Floats, Ints, ItemNumbers, Tasks
from gmeta.experiment.baselines.tuning import Baselines, Tuned
from gmeta.experiment.measurement import split as cold_start
from gmeta.experiment.measurement.split import (
    EVERYTHING,
    Split,
    number_items,
    read_tasks,
    read_whole,
    yes_from,
)
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.task_sets import measured_tasks, other_training_tasks
from gmeta.experiment.results.evaluation import TrainingRun
from gmeta.experiment.runs.all_runs import load_trained
from gmeta.experiment.runs.model_choice import experiment_features, task_columns
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.io.reader_stats import data_errors
from gmeta.models import MetaModel

# The attributes of items, collected from the batches on which methods and baselines are measured.


class AttributeReader:
    """Collects the attributes of items from batches.

    Args:
      item: The column of items; None: there are no items, and hence no attributes.
      columns: Columns of ids, or of lists of ids, that may be attributes of items.

    Example:
      >>> reader = AttributeReader("item", ["genre"])
      >>> items, genres = tf.constant([5, 9, 5]), tf.ragged.constant([[1], [1, 2], [1]])
      >>> for batch in reader.watch([{"features": {"item": items, "genre": genres}}]):
      ...     pass
      >>> reader.attributes(ItemNumbers(np.array([5]), np.array([9]))).columns["genre"].shape
      (2, 2)
    """

    def __init__(self, item: str | None, columns: Sequence[str]) -> None:
        self.item = item
        self._items: list[Ints] = []
        self._columns: dict[str, list[tuple[Ints, Ints]]] = {} if item is None else {c: [] for c in columns}

    @classmethod
    def of(cls, config: ExperimentConfig) -> AttributeReader:
        """Read the embedded columns except the item's and the tasks' own; columns of numbers are left out."""
        own = (config.item, *task_columns(config))
        return cls(config.item, [each.name for each in experiment_features(config) if each.name not in own])

    def watch(
        self, batches: Iterable[Mapping[str, Any]], key: str = "features"
    ) -> Iterator[Mapping[str, Any]]:
        """Yield batches unchanged, and store the attributes of their items.

        Args:
          batches: Batches of tasks, or elements of `gmeta.io.groups`.
          key: The key of the columns: ``"features"`` for the former, ``"columns"`` for the latter.
        """
        for batch in batches:
            if self._columns:
                items, first = np.unique(np.asarray(batch[key][self.item]), return_index=True)
                self._items.append(items)
                for name, found in self._columns.items():
                    found.append(_values(tf.gather(batch[key][name], first)))
            yield batch

    def attributes(self, numbers: ItemNumbers) -> ItemAttributes | None:
        """Return the attributes of all numbered items; None if no column is an attribute of items.

        An item has the values of its first occurrence. A column whose values vary between an item's rows,
        such as a user's city or the hour of a row, is left out.
        """
        if not self._items:
            return None
        ids, first, again = np.unique(np.concatenate(self._items), return_index=True, return_inverse=True)
        met = np.arange(len(again)) != first[again]
        rows = first[np.searchsorted(ids, numbers.ids)]
        kept = {}
        for name, found in self._columns.items():
            values, counts = (np.concatenate(each) for each in zip(*found, strict=True))
            mark = mark_rows(values, counts)
            if np.count_nonzero(mark != mark[first[again]]) <= MOST_CHANGED * np.count_nonzero(met):
                kept[name] = _choose(values, counts, rows)
        return ItemAttributes.of(kept) if kept else None


def _values(column: tf.Tensor | tf.RaggedTensor) -> tuple[Ints, Ints]:
    """Return a column's values, row after row, and how many each row has."""
    if isinstance(column, tf.RaggedTensor):
        return column.flat_values.numpy(), column.row_lengths().numpy()
    values = np.asarray(column)
    return values.ravel(), np.full(len(values), values.size // max(len(values), 1))


def _choose(values: Ints, counts: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the values and counts of some rows."""
    start, chosen = np.cumsum(counts) - counts, counts[rows]
    end = np.cumsum(chosen)
    return values[np.arange(chosen.sum()) + np.repeat(start[rows] - (end - chosen), chosen)], chosen


@dataclass(frozen=True)
class MeasuredRun:
    """The predictions of a run's methods and of the baselines on its test splits.

    Attributes:
      splits: Test split -> predictions.
      training: Method -> the curves of each seed.
      tuned: The baselines' settings.
      baselines: The baselines' names, the simplest first.
      baseline_seconds: The time to tune and fit the baselines, and to predict with them.
    """

    splits: Mapping[str, Split]
    training: Mapping[str, list[TrainingRun]]
    tuned: Tuned
    baselines: Sequence[str]
    baseline_seconds: float


def read_training(
    config: ExperimentConfig, data: Path, reader: AttributeReader, on_bad: OnBad = "raise"
) -> Tasks:
    """Read all rows that methods are trained on; tasks with the size of measured ones are cut like them.

    Args:
      config: The experiment.
      data: A prepared data set.
      reader: Collects the attributes of the rows' items.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
    """
    measured = measured_tasks(config, data, config.train_split, on_bad, shard=EVERYTHING)
    warm = read_tasks(reader.watch(measured), config.item, yes_from(config))
    others = reader.watch(other_training_tasks(config, data, on_bad), "columns")
    return warm.and_whole(read_whole(others, config.item, config.label, yes_from(config)))


def measure(run: RunFolder, on_bad: OnBad = "raise") -> MeasuredRun:
    """Predict the test splits of a trained experiment with all of its methods and the baselines.

    Baselines are tuned on and fitted to the tasks that methods were trained on.

    Raises:
      DataError: The run isn't fully trained; the message names the method and the seed.
    """
    config, data = run.load()
    primary = config.test_splits[0]
    reader = AttributeReader.of(config)
    with data_errors():
        warm = read_training(config, data, reader, on_bad)
        batches = {
            name: list(reader.watch(measured_tasks(config, data, name, on_bad, shard=EVERYTHING)))
            for name in config.test_splits
        }
    splits = {name: Split(config, cold_start.query_rows(each)) for name, each in batches.items()}
    first = splits[primary]
    training: dict[str, list[TrainingRun]] = {method: [] for method in config.methods}
    for method in config.methods:
        for seed in config.seeds:
            model, course = load_trained(config, run, method, seed)
            training[method].append(course)
            for name, split in splits.items():
                after = cold_start.predict_after(model, batches[name], config.evaluation_steps)
                for steps, predictions in after.items():
                    split.add(method, steps, predictions)
            for size in config.support_sizes:
                steps = config.support_steps
                limited = cold_start.predict_after(model, batches[primary], [steps], support_size=size)
                first.limited.setdefault((method, size), []).append(limited[steps])
            if config.loss == "mse" and model.learner.inner.algorithm == "ridge":
                first.varied.setdefault(method, []).append(_with_variance(config, model, batches[primary]))
    started = time.monotonic()
    asked = {name: read_tasks(each, config.item, yes_from(config)) for name, each in batches.items()}
    numbers = ItemNumbers.of_tasks(warm, asked.values())
    warm, asked = number_items(warm, numbers), {name: number_items(asked[name], numbers) for name in asked}
    baselines = Baselines.of(
        warm,
        numbers.unknown,
        by_item=config.item is not None,
        attributes=reader.attributes(numbers),
    )

    def ask(split: str, tasks: Tasks) -> dict[str, Floats]:
        if split == config.train_split:
            return baselines.predict_warm(warm, tasks)
        return baselines.predict(tasks)

    for name, split in splits.items():
        for baseline, found in ask(name, asked[name]).items():
            split.add(baseline, 0, split.outputs(found))
    for size in config.support_sizes:
        for baseline, found in ask(primary, asked[primary].latest(size)).items():
            first.limited[baseline, size] = [first.outputs(found)]
    if config.loss == "mse" and primary != config.train_split:
        means = baselines.predict(asked[primary])
        for baseline, variance in baselines.variances(asked[primary]).items():
            first.varied[baseline] = [(means[baseline], variance)]
    seconds = time.monotonic() - started
    return MeasuredRun(splits, training, baselines.tuned, list(baselines.predictors), seconds)


def _with_variance(
    config: ExperimentConfig, model: MetaModel, batches: Sequence[Mapping[str, Any]]
) -> tuple[Floats, Floats]:
    """Predict query rows and their variances with a model whose inner loop is ridge."""
    steps = model.learner.inner.steps_in("evaluation")
    predictions = cold_start.predict_after(model, batches, [steps])[steps]
    deviation = config.label_scale.deviation if config.label_scale else 1.0
    noise = cold_start.label_noise(model, deviation)
    return predictions, cold_start.predict_variance(model, batches, noise)
