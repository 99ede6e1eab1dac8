"""Builds, trains and scores the models of an experiment on rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.experiment.baselines.task_rows import Floats, Ints
from gmeta.experiment.plan.ranking_config import GRM, RankingMethod
from gmeta.experiment.ranking.examples import Encoding, Examples, Parts
from gmeta.experiment.ranking.networks import RankingModel, RowModel, SequenceModel
from gmeta.experiment.runs import best_epoch
from gmeta.io.readers.epoch import count_epochs

LOGGED = "val_loss"
"""What Keras logs and epochs are chosen by: the log loss, or the scaled squared error."""


def build(settings: RankingMethod, parts: Parts, seed: int) -> RowModel:
    """Build and compile the model of a method, at its initial weights."""
    random.seed(seed)  # Keras' layers take their seeds from it
    tf.random.set_seed(seed)
    encoding = parts.encoding
    given = (settings, encoding, len(parts.train))
    model: RowModel = (
        SequenceModel(*given, parts.history, seed) if settings.model == GRM else RankingModel(*given, seed)
    )
    loss = (
        tf.keras.losses.BinaryCrossentropy(from_logits=True)
        if encoding.config.binary
        else tf.keras.losses.MeanSquaredError()
    )
    metrics = [tf.keras.metrics.AUC(name="auc", from_logits=True)] if encoding.config.binary else []
    model.compile(tf.keras.optimizers.Adam(settings.learning_rate), loss, metrics=metrics)
    nothing = Examples(
        {
            name: (np.zeros(0, np.int64), np.zeros(3, np.int64))
            if name in encoding.lists
            else np.zeros(2, np.int64)
            for name in encoding.ids
        },
        np.zeros((2, len(encoding.scales)), np.float32),
        np.zeros(2),
        *[np.zeros(2, np.int64)] * 2,
    )
    model(model.inputs_of(nothing), training=False)  # makes the weights
    # A checkpoint restores the optimizer's moments into existing variables, so they must be built now.
    model.optimizer.build(model.trainable_variables)
    return model


def batches(
    model: RowModel, asked: Examples, encoding: Encoding, size: int, order: tuple[int, int] | None = None
) -> tf.data.Dataset:
    """Return batches of inputs and labels.

    Args:
      model: The model.
      asked: The rows.
      encoding: The unit of labels.
      size: Rows in a batch; approximate, if the model takes rows in groups.
      order: The seed of the rows' order, and the first epoch. Epochs have different orders, and follow
        without end. None: the rows once, in their order, or group after group.
    """
    inputs = model.inputs_of(asked)
    labels = asked.labels if encoding.config.binary else (asked.labels - encoding.mean) / encoding.deviation
    answers = tf.constant(labels[:, np.newaxis], tf.float32)
    groups = model.groups(asked)
    rows = tf.range(len(asked), dtype=tf.int64) if groups is None else tf.constant(groups[0], tf.int64)

    def read(chosen: tf.Tensor) -> tuple[dict[str, Any], tf.Tensor]:
        return {name: tf.gather(each, chosen) for name, each in inputs.items()}, tf.gather(answers, chosen)

    if order is None:
        return tf.data.Dataset.from_tensor_slices(rows).batch(size).map(read).prefetch(2)
    of_epoch, count = _single(rows, size) if groups is None else _grouped(rows, groups[1], size)

    def shuffled(number: tf.Tensor) -> tf.data.Dataset:
        return of_epoch(tf.stack([tf.constant(order[0], tf.int64), number]))

    found = count_epochs(order[1]).flat_map(shuffled).map(read).prefetch(2)
    return found.apply(tf.data.experimental.assert_cardinality(count))


_Drawn = tuple[Callable[[tf.Tensor], tf.data.Dataset], int]
"""The seed of an epoch -> its batches of row numbers; and how many they are."""


def _single(rows: tf.Tensor, size: int) -> _Drawn:
    def of_epoch(key: tf.Tensor) -> tf.data.Dataset:
        drawn = tf.random.experimental.stateless_shuffle(rows, seed=key)
        return tf.data.Dataset.from_tensor_slices(drawn).batch(size)

    return of_epoch, -(-len(rows) // size)


def _grouped(rows: tf.Tensor, groups: Ints, size: int) -> _Drawn:
    """Draw whole groups; each epoch has the same number of batches, of about equally many rows."""
    splits = tf.constant(groups, tf.int64)
    sizes, total = splits[1:] - splits[:-1], len(rows)
    # No group is larger than a batch, so that a group begins in each.
    count = max(min(-(-total // size), total // int(tf.reduce_max(sizes))), 1)

    def of_epoch(key: tf.Tensor) -> tf.data.Dataset:
        drawn = tf.random.experimental.stateless_shuffle(tf.range(len(sizes), dtype=tf.int64), seed=key)
        begin = tf.cumsum(tf.gather(sizes, drawn), exclusive=True)
        together = tf.RaggedTensor.from_value_rowids(drawn, begin * count // total, nrows=count)
        return tf.data.Dataset.from_tensor_slices(together).map(rows_of)

    def rows_of(chosen: tf.Tensor) -> tf.Tensor:
        places = tf.ragged.range(tf.gather(splits, chosen), tf.gather(splits, chosen + 1))
        return tf.gather(rows, places.flat_values)

    return of_epoch, count


def train(
    settings: RankingMethod,
    seed: int,
    *,
    parts: Parts,
    folder: Path,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
) -> int:
    """Train a method until validation no longer improves, or resume its training.

    Returns:
      How many epochs earlier calls had done.
    """
    model = build(settings, parts, seed)
    return best_epoch.train(
        model, folder, _stopping(settings), *_fed(model, settings, seed, parts), callbacks
    )


def measure_epochs(
    settings: RankingMethod,
    seed: int,
    *,
    parts: Parts,
    report: Callable[[int, float], None] = lambda epoch, loss: None,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
) -> float:
    """Train a method as `train` does, but save nothing, and return the best epoch's loss in validation.

    Args:
      settings: The method.
      seed: The seed of weights and of the order of rows.
      parts: The data.
      report: As in `gmeta.experiment.runs.best_epoch.measure`.
      callbacks: Keras callbacks.
    """
    model = build(settings, parts, seed)
    fed = _fed(model, settings, seed, parts)
    return best_epoch.measure(model, _stopping(settings), *fed, report, callbacks)


def load_best(method: str, settings: RankingMethod, seed: int, *, parts: Parts, folder: Path) -> RowModel:
    """Load the best epoch of a method.

    Raises:
      DataError: The method isn't fully trained.
    """
    found: RowModel = best_epoch.load_best(
        lambda: build(settings, parts, seed),
        folder,
        _stopping(settings),
        f"{method}, seed {seed}",
    )
    return found


def _stopping(settings: RankingMethod) -> best_epoch.Stopping:
    return best_epoch.Stopping(LOGGED, False, settings.epochs, settings.patience)


def _fed(
    model: RowModel, settings: RankingMethod, seed: int, parts: Parts
) -> tuple[best_epoch.Batches, tf.data.Dataset]:
    """Return the function that makes batches for training, and the batches of validation."""
    size = settings.rows_per_batch
    assert size is not None  # `RankingMethod.complete` sets it
    return (
        lambda epoch: batches(model, parts.train, parts.encoding, size, (seed, epoch)),
        batches(model, parts.validation, parts.encoding, model.asked),
    )


@dataclass(frozen=True)
class ModelScorer:
    """A trained model as a `gmeta.experiment.ranking.baselines.Scorer`."""

    model: RowModel
    encoding: Encoding

    def scores(self, asked: Examples) -> Floats:
        """Compute logits, or labels, (rows,)."""
        model, encoding = self.model, self.encoding
        groups = model.groups(asked)
        order = np.arange(len(asked)) if groups is None else groups[0]
        scores = np.zeros(len(asked))
        for begin in range(0, len(asked), model.asked):
            rows = order[begin : begin + model.asked]
            scores[rows] = model(model.inputs_of(asked.take(rows)), training=False).numpy()[:, 0]
        return scores if encoding.config.binary else encoding.mean + encoding.deviation * scores
