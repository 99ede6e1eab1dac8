"""A test split: the predictions of methods and baselines, and their measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

from gmeta.core import collectives
from gmeta.experiment.baselines.task_rows import Floats, ItemNumbers, Rows, Tasks
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.results.evaluation import Calibration
from gmeta.experiment.results.metrics import (
    OF_ORDER,
    Bootstrap,
    Cell,
    auc,
    compare,
    rating_metrics,
    refuse_nan,
)
from gmeta.models import MetaModel

# Metrics for labels other than ratings: arbitrary numbers, and binary labels.


def number_metrics(labels: ArrayLike, predictions: ArrayLike) -> dict[str, float]:
    """Compute mean absolute and root mean squared error; nan without rows or with non-finite predictions.

    Raises:
      DataError: A label is NaN.

    Example:
      >>> number_metrics([10.0, -10.0], [13.0, -14.0])
      {'mae': 3.5, 'rmse': 3.5355339059327378}
    """
    off = np.asarray(predictions, np.float64) - refuse_nan(labels)
    if not off.size or not np.isfinite(off).all():
        return {"mae": np.nan, "rmse": np.nan}
    return {"mae": float(np.abs(off).mean()), "rmse": float(np.sqrt(np.square(off).mean()))}


def click_metrics(
    labels: ArrayLike, logits: ArrayLike, row_splits: ArrayLike, positive: float
) -> dict[str, float]:
    """Compute log loss, AUC over all rows, and the weighted mean of each task's own AUC.

    Args:
      labels: (rows,).
      logits: (rows,) logits that a row's label is at least ``positive``.
      row_splits: (tasks + 1,): where each task's rows begin and end.
      positive: The least label that is positive.

    Returns:
      ``logloss``, ``auc`` and ``gauc`` (`gmeta.metrics.GAUC`). A metric that is undefined is nan; if a logit
      isn't finite, all three are nan.

    Raises:
      DataError: A label is NaN.

    Example:
      >>> found = click_metrics([1, 0, 1, 1], [1.0, 0.0, 0.0, 0.0], [0, 2, 4], positive=1)
      >>> round(found["logloss"], 3), round(found["auc"], 3), found["gauc"]
      (0.598, 0.667, 1.0)
    """
    clicked = refuse_nan(labels) >= positive
    scores, splits = np.asarray(logits, np.float64), np.asarray(row_splits, np.int64)
    if not scores.size or not np.isfinite(scores).all():
        return {"logloss": np.nan, "auc": np.nan, "gauc": np.nan}
    loss = np.logaddexp(0.0, np.where(clicked, -scores, scores)).mean()
    return {"logloss": float(loss), "auc": auc(clicked, scores, 0.5), "gauc": _gauc(clicked, scores, splits)}


def _gauc(clicked: NDArray[np.bool_], scores: NDArray[np.float64], splits: NDArray[np.int64]) -> float:
    """Compute GAUC for all tasks at once from rank sums (Mann and Whitney); ties share the mean rank."""
    sizes = np.diff(splits)
    task = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((scores, task))
    first = splits[:-1][task[order]]  # the first row of each row's task
    same = np.concatenate([[False], (np.diff(scores[order]) == 0) & (np.diff(task[order]) == 0)])
    starts = np.flatnonzero(~same)
    tied = np.cumsum(~same) - 1
    middle = (starts + np.append(starts[1:], len(order)) - 1) / 2
    ranks = np.empty(len(order))
    ranks[order] = middle[tied] - first + 1
    yes = np.bincount(task, weights=clicked, minlength=len(sizes))
    pairs = yes * (sizes - yes)
    above = np.bincount(task, weights=ranks * clicked, minlength=len(sizes)) - yes * (yes + 1) / 2
    sound = pairs > 0
    return float(np.average(above[sound] / pairs[sound], weights=sizes[sound])) if sound.any() else np.nan


# Converts batches of tasks to rows for baselines, and baselines' predictions to the unit of methods' outputs.

SIDES = ("support", "query")


def read_tasks(batches: Iterable[Mapping[str, Any]], item: str | None, positive: float | None) -> Tasks:
    """Collect the rows of all batches; items keep their ids.

    Args:
      batches: Batches as `gmeta.io.tasks` yields them.
      item: The column of items; None: all rows belong to one item.
      positive: A label of at least this value counts as 1, any other as 0. None: labels are unchanged.
    """
    parts: dict[str, list[list[Any]]] = {side: [[], [], []] for side in SIDES}
    for batch in batches:
        labels = _labels(batch["label"], positive)
        items = np.zeros(len(labels), np.int64) if item is None else np.asarray(batch["features"][item])
        for side, found in parts.items():
            mask = batch[side]["mask"].numpy() > 0
            index = batch[side]["index"].numpy()[mask]
            for values, each in zip(found, (items[index], labels[index], mask.sum(axis=1)), strict=True):
                values.append(each)
    return Tasks(*(_rows(*parts[side]) for side in SIDES))


def read_whole(
    elements: Iterable[Mapping[str, Any]], item: str | None, label: str, positive: float | None
) -> Rows:
    """Collect the rows of tasks that aren't cut; items keep their ids.

    Args:
      elements: Elements as `gmeta.io.groups` yields them.
      item: As in `read_tasks`.
      label: The column to predict.
      positive: As in `read_tasks`.
    """
    found: list[list[Any]] = [[], [], []]
    for element in elements:
        labels = _labels(element["columns"][label], positive)
        items = np.zeros(len(labels), np.int64) if item is None else np.asarray(element["columns"][item])
        for values, each in zip(found, (items, labels, np.diff(element["row_splits"])), strict=True):
            values.append(each)
    return _rows(*found)


def _labels(labels: Any, positive: float | None) -> Floats:
    values = np.asarray(labels, np.float64)
    return values if positive is None else (values >= positive).astype(np.float64)


def _rows(items: list[Any], labels: list[Any], sizes: list[Any]) -> Rows:
    splits = np.cumsum(np.concatenate([[0], *sizes])).astype(np.int64)
    return Rows(
        np.concatenate([np.zeros(0, np.int64), *items]), np.concatenate([np.zeros(0), *labels]), splits
    )


def number_items(tasks: Tasks, numbers: ItemNumbers) -> Tasks:
    """Replace items' ids by their numbers."""
    support, query = (
        Rows(numbers.of(side.items), side.labels, side.row_splits) for side in (tasks.support, tasks.query)
    )
    return Tasks(support, query)


def as_logits(rates: Floats, least: float = 1e-3) -> Floats:
    """Convert rates to logits, clipped to ``least`` and ``1 - least``: no event is certain from few rows."""
    cut = np.clip(rates, least, 1 - least)
    return np.log(cut) - np.log1p(-cut)


# Measures methods on tasks that they were not trained on, before and after adaptation.

WORTH_A_GRAPH = 16
"""With more batches than this, predictions run in a traced graph."""


@dataclass(frozen=True)
class QueryRows:
    """The real query rows of many tasks, one task after another.

    Attributes:
      labels: (rows,).
      row_splits: (tasks + 1,): where each task's rows begin and end.
    """

    labels: Floats
    row_splits: NDArray[np.int64]

    @classmethod
    def join(cls, parts: Sequence[QueryRows]) -> QueryRows:
        """Join the rows of several parts, one part after another."""
        sizes = np.concatenate([np.diff(part.row_splits) for part in parts])
        splits = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(np.concatenate([part.labels for part in parts]), splits)


def query_rows(batches: Iterable[Mapping[str, Any]]) -> QueryRows:
    """Collect the query rows of all batches."""
    labels, lengths = [], []
    for batch in batches:
        mask = batch["query"]["mask"].numpy() > 0
        index = batch["query"]["index"].numpy()[mask]
        labels.append(batch["label"].numpy()[index])
        lengths.append(mask.sum(axis=1))
    splits = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return QueryRows(np.concatenate(labels).astype(np.float64), splits)


def predict_after(
    model: MetaModel,
    batches: Iterable[Mapping[str, Any]],
    steps: Sequence[int],
    *,
    support_size: int | None = None,
) -> dict[int, Floats]:
    """Predict the query rows after several numbers of inner steps, each continuing the one before.

    Args:
      model: A trained model. The call doesn't change it.
      batches: Task batches.
      steps: Numbers of inner gradient steps, e.g. (0, 1, 3, 5).
      support_size: Adapt on each task's latest ``support_size`` support samples only (or all if it has
        fewer); None for all.

    In a job of N ranks, every rank gets the same batches and predicts every N-th of them.

    Returns:
      Steps -> (rows,) predictions, in the order of `query_rows`. Every rank gets all predictions.
    """
    parts: dict[int, list[Floats]] = {goal: [] for goal in sorted(set(steps))}
    given = list(batches)
    # Tracing the unrolled loop takes as long as running about ten batches op by op. With several ranks,
    # all must make the same exchanges, including a rank that has no batch left.
    traced = len(given) > WORTH_A_GRAPH and collectives.world().size == 1
    for batch in _own_share(model, given):
        batch = _latest_support(batch, support_size)
        mask = batch["query"]["mask"] > 0
        predict = model.adapter.predict_after if traced else model.predict_after
        for goal, predicted in predict(batch, tuple(parts)).items():
            parts[goal].append(tf.boolean_mask(predicted, mask).numpy())
    whole = {goal: _of_all_ranks(predictions) for goal, predictions in parts.items()}
    return {goal: np.concatenate(predictions).astype(np.float64) for goal, predictions in whole.items()}


def predict_variance(model: MetaModel, batches: Iterable[Mapping[str, Any]], noise: float) -> Floats:
    """Predict the variance of the query rows' labels with a model whose inner loop is ridge.

    Args:
      model: A trained model. The call doesn't change it.
      batches: Task batches.
      noise: The variance of labels around a task's own outputs (`label_noise`).

    Returns:
      (rows,) in the order of `query_rows`. Ranks divide the batches as in `predict_after`; each gets all.
    """
    own = [
        tf.boolean_mask(model.predict_variance(batch), batch["query"]["mask"] > 0).numpy()
        for batch in _own_share(model, list(batches))
    ]
    return np.asarray(np.concatenate(_of_all_ranks(own)).astype(np.float64) + noise)


def label_noise(model: MetaModel, deviation: float = 1.0) -> float:
    """Return the variance of labels around a ridge head's outputs that the head has learned.

    Args:
      model: A model whose inner loop is ridge and whose loss is the squared error in units of ``deviation``.
      deviation: See `gmeta.experiment.runs.model_choice.ScaledError`.

    The loss of a row, divided by the learned noise, is half its squared error over the variance.
    """
    return float(model.learner.inner_rates.noise()) * deviation**2 / 2


def _own_share(model: MetaModel, batches: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield every N-th batch, from the rank's number on; every rank does the same number of lookups."""
    here = collectives.world()
    for first in range(0, len(batches), here.size):
        if first + here.rank < len(batches):
            yield batches[first + here.rank]
        else:  # other ranks still have a batch, and look up rows that this rank holds
            nothing = tf.nest.map_structure(lambda ids: ids[:0], dict(batches[first]["features"]))
            model.collection.lookup(nothing, insert=False)


def _of_all_ranks(own: list[Floats]) -> list[Floats]:
    """Gather the predictions of all ranks, in the order of all batches."""
    ranks = collectives.allgather_objects(own)
    return [of_rank[turn] for turn in range(len(ranks[0])) for of_rank in ranks if turn < len(of_rank)]


def _latest_support(batch: Mapping[str, Any], size: int | None) -> Mapping[str, Any]:
    """Return the batch with all but each task's last ``size`` support samples masked out."""
    if size is None:
        return batch
    support = batch["support"]
    after = tf.math.cumsum(support["mask"], axis=1, reverse=True)  # samples from here to the task's end
    mask = tf.where(after <= size, support["mask"], 0)
    return {**batch, "support": {**support, "mask": mask}}


Results = dict[int, dict[str, list[float]]]
"""Inner steps -> metric -> one value per seed."""

EVERYTHING = (0, 1)  # ranks divide the predictions, not the tasks


def yes_from(config: ExperimentConfig) -> float | None:
    """Return the least label that counts as 1, or None if the experiment doesn't predict a rate."""
    return config.positive if config.own_columns and config.loss != "mse" else None


@dataclass
class Split:
    """The query rows of a split's tasks, and the predictions for them.

    Attributes:
      config: The experiment.
      rows: The query rows.
      predictions: Method or baseline, and steps -> for each seed (rows,). A baseline has 0 steps.
      limited: Method or baseline, and how many support rows a task may use -> for each seed (rows,).
      varied: Method or baseline with variances -> for each seed predictions and variances, (rows,).
    """

    config: ExperimentConfig
    rows: QueryRows
    predictions: dict[Cell, list[Floats]] = field(default_factory=dict)
    limited: dict[Cell, list[Floats]] = field(default_factory=dict)
    varied: dict[str, list[tuple[Floats, Floats]]] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence[Split]) -> Split:
        """Join splits of several runs into one that has all of their rows, in the order of ``parts``.

        The runs have the same settings. The predictions of a seed come from this seed in each run.
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
        """Add one seed's predictions."""
        self.predictions.setdefault((name, steps), []).append(predictions)

    def results(self) -> dict[str, Results]:
        """Measure all predictions: method or baseline -> results."""
        found: dict[str, Results] = {}
        for (name, steps), seeds in self.predictions.items():
            metrics = [self.measure(each) for each in seeds]
            found.setdefault(name, {})[steps] = {key: [each[key] for each in metrics] for key in metrics[0]}
        return found

    def support_curve(self) -> dict[str, dict[int, list[float]]]:
        """Measure predictions from few support rows: method or baseline -> rows -> MAE per seed."""
        found: dict[str, dict[int, list[float]]] = {}
        for (name, size), seeds in self.limited.items():
            found.setdefault(name, {})[size] = [self.measure(each)["mae"] for each in seeds]
        return found

    def calibration(self) -> dict[str, Calibration]:
        """Compare variances with errors: method or baseline -> calibration."""
        return {
            name: Calibration.of(self.rows.labels, *map(list, zip(*seeds, strict=True)))
            for name, seeds in self.varied.items()
        }

    def measure(self, predictions: Floats) -> dict[str, float]:
        """Compute the metrics of a network's outputs, which are logits where labels are binary."""
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
        """Compare each method with each baseline; None if errors aren't defined for single rows."""
        errors = {cell: self._task_errors(seeds) for cell, seeds in self.predictions.items()}
        methods = {cell: found for cell, found in errors.items() if cell[0] not in baselines and found}
        if not methods:
            return None
        return compare(methods, {name: errors[name, 0] for name in baselines}, np.diff(self.rows.row_splits))

    def _task_errors(self, seeds: Sequence[Floats]) -> dict[str, Floats]:
        """Sum the errors of each task's rows: metric -> (seeds, tasks); empty if only order is measured."""
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
