"""Measurement of methods on tasks that they were not trained on, before and after adaptation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gmeta.core import collectives
from gmeta.models import MetaModel

Floats = NDArray[np.float64]

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
      support_size: Adapt on each task's latest ``support_size`` support samples only (a task with fewer
        uses all it has); None for all.

    In a job of N ranks, every rank gets the same batches and predicts every N-th of them.

    Returns:
      Steps -> (rows,) predictions, in the order of `query_rows`. Every rank gets all predictions.
    """
    parts: dict[int, list[Floats]] = {goal: [] for goal in sorted(set(steps))}
    given = list(batches)
    # Tracing the unrolled loop takes as long as running it op by op for some ten batches. With several ranks,
    # all of them must make the same exchanges, including a rank that has no batch left.
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
    """Predict the variance of the query rows' labels, by a model whose inner loop is ridge.

    Args:
      model: A trained model. The call doesn't change it.
      batches: Task batches.
      noise: The variance of labels around a task's own outputs (`label_noise`).

    Returns:
      (rows,) in the order of `query_rows`. Every rank gets all of them, and predicts as in `predict_after`.
    """
    own = [
        tf.boolean_mask(model.predict_variance(batch), batch["query"]["mask"] > 0).numpy()
        for batch in _own_share(model, list(batches))
    ]
    return np.asarray(np.concatenate(_of_all_ranks(own)).astype(np.float64) + noise)


def label_noise(model: MetaModel, deviation: float = 1.0) -> float:
    """Return the variance of labels that a ridge head has learnt to expect around its outputs.

    Args:
      model: A model whose inner loop is ridge and whose loss is the squared error in units of ``deviation``.
      deviation: See `gmeta.experiment.runs.scaled_error.ScaledError`.

    The loss of a row, divided by the learned noise, is half its squared error over the variance.
    """
    return float(model.learner.inner_rates.noise()) * deviation**2 / 2


def _own_share(model: MetaModel, batches: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield every N-th batch, starting at the rank's number; every rank does the same number of lookups."""
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
