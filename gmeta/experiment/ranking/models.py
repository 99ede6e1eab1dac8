"""The models of an experiment on rows: how they are made, trained and asked for scores."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.experiment.baselines.task_rows import Floats
from gmeta.experiment.plan.ranking_config import RankingMethod
from gmeta.experiment.ranking.examples import Encoding, Examples, Parts
from gmeta.experiment.runs import best_epoch
from gmeta.initializers import Normal
from gmeta.io.readers.epoch import count_epochs
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.models.zoo.dcn_model import DCNNetwork
from gmeta.models.zoo.dlrm_model import DLRMNetwork
from gmeta.optimizers import Adam, RowPrior

LOGGED = "val_loss"
"""What Keras logs and epochs are chosen by: the log loss, or the scaled squared error."""

IDS, NUMBERS = "ids", "numbers"
_START = 0.05  # deviation of initial rows
_NOISE = 1.6  # twice the share of labels' variance that models leave
_ASKED = 4096  # rows at once


class RankingModel(Model):
    r"""A network on embeddings and numbers, plus a weight for each id.

    .. math:: \hat y = b + \sum_f w_{x_f} + g(v_{x_1}, \dots, v_{x_n}, z)

    z are the numbers of a row, and g is the network of DCN-v2 or DLRM, or half the sum of products of all
    pairs of vectors, as in factorisation machines (Rendle, 2010), where each number has a vector of its own.
    An unknown id, with the number 0, has no weight and a vector of zeros; training takes some ids for unknown
    ones. All ids are in one table, which a `RowPrior` draws towards zero.

    Args:
      settings: The network.
      encoding: The features and the numbers.
      samples: The number of rows in training.
      seed: The seed of initial weights and rows, and of what is dropped.

    Shapes:
      {"ids": (samples, features) int64, a list's name: ragged int64, "numbers": (samples, columns)} ->
      (samples, 1): logits, or labels less their mean in units of their deviation.
    """

    def __init__(self, settings: RankingMethod, encoding: Encoding, samples: int, seed: int) -> None:
        super().__init__(name="ranking")
        s, self.kind = settings, settings.model
        self.layout = Layout.of(encoding)
        unit = 1.0 if encoding.config.binary else _NOISE
        prior = RowPrior((s.bias_variance, *[s.variance] * s.dim), samples, unit)
        table = TableConfig(
            IDS, s.dim + 1, initializer=Normal(0.0, _START), optimizer=Adam(None, prior=prior)
        )
        self.collection = EmbeddingCollection(
            [
                FeatureConfig(IDS, table),
                *(FeatureConfig(name, table, "sqrtn") for name in self.layout.lists),
            ],
            seed=seed,
        )
        self.unknown, self.seed = s.unknown, seed
        mean = encoding.mean
        logit = float(np.log(mean / (1 - mean))) if encoding.config.binary and 0 < mean < 1 else 0.0
        self.bias = self.add_weight("bias", [], initializer=tf.keras.initializers.Constant(logit))
        self.drop = tf.keras.layers.Dropout(s.dropout if s.model == "dlrm" else 0.0, seed=seed)
        names, floats = self.layout.names, [f"{name}/number" for name in self.layout.numbers]
        if s.model == "fm":
            self.network = None
            start = tf.keras.initializers.RandomNormal(stddev=_START, seed=seed)
            if floats:
                self.of_numbers = self.add_weight("numbers", [len(floats), s.dim + 1], initializer=start)
        elif s.model == "dlrm":
            self.network = DLRMNetwork(
                names, s.dim, floats=floats, bottom=s.hidden[:1], top=s.hidden, head="rating", seed=seed
            )
        else:
            self.network = DCNNetwork(
                names,
                floats=floats,
                cross=s.cross,
                rank=s.rank,
                hidden=s.hidden,
                dropout=s.dropout,
                head="rating",
                seed=seed,
            )
        self.floats = floats

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Compute the outputs of rows."""
        ids, numbers = inputs[IDS], inputs[NUMBERS]
        known = self.layout.numbered(ids)
        if training and self.unknown:
            known &= tf.random.uniform(tf.shape(ids), seed=self.seed) >= self.unknown
        lists = {name: inputs[name] for name in self.layout.lists}
        found = self.collection({IDS: ids, **lists})
        rows = found[IDS] * tf.cast(known, tf.float32)[..., tf.newaxis]
        if lists:
            rows = tf.concat([rows, tf.stack([found[name] for name in lists], axis=1)], axis=1)
        linear = tf.reduce_sum(rows[..., 0], axis=1, keepdims=True) + self.bias
        vectors = self.drop(rows[..., 1:], training=training)
        if self.network is None:
            if self.floats:
                of_numbers = numbers[..., tf.newaxis] * self.of_numbers
                linear += tf.reduce_sum(of_numbers[..., 0], axis=1, keepdims=True)
                vectors = tf.concat([vectors, of_numbers[..., 1:]], axis=1)
            together = tf.reduce_sum(vectors, axis=1)
            crossed = tf.square(together) - tf.reduce_sum(tf.square(vectors), axis=1)
            return linear + 0.5 * tf.reduce_sum(crossed, axis=1, keepdims=True)
        x = dict(zip(self.layout.names, tf.unstack(vectors, axis=1), strict=True))
        x |= dict(zip(self.floats, tf.unstack(numbers, num=len(self.floats), axis=1), strict=True))
        return linear + self.network(x, training=training)


@dataclass(frozen=True)
class Layout:
    """How the numbers of all features' ids become keys of one table.

    Attributes:
      single: Features with one id a row -> the key of its number 0, which no row has.
      lists: Features with lists of ids -> likewise.
      numbers: The columns of numbers.
    """

    single: Mapping[str, int]
    lists: Mapping[str, int]
    numbers: Sequence[str]

    @classmethod
    def of(cls, encoding: Encoding) -> Layout:
        """Number the keys of an encoding."""
        sizes = encoding.sizes
        features = encoding.config.features
        ends = np.cumsum([sizes[name] for name in features])
        starts = {name: int(end - sizes[name]) for name, end in zip(features, ends, strict=True)}
        lists = [name for name in features if name in encoding.lists]
        return cls(
            {name: start for name, start in starts.items() if name not in lists},
            {name: starts[name] for name in lists},
            [*encoding.scales],
        )

    @property
    def names(self) -> list[str]:
        """All features, in the order of their vectors."""
        return [*self.single, *self.lists]

    def numbered(self, keys: tf.Tensor) -> tf.Tensor:
        """Return which keys, (samples, features), are those of known ids."""
        return keys > tf.constant([*self.single.values()], tf.int64)

    def inputs(self, asked: Examples) -> dict[str, Any]:
        """Return what the model takes."""
        keys = [np.asarray(asked.ids[name]) + start for name, start in self.single.items()]
        found: dict[str, Any] = {
            IDS: tf.constant(np.stack(keys, axis=1) if keys else np.zeros((len(asked), 0)), tf.int64),
            NUMBERS: tf.constant(asked.numbers),
        }
        for name, start in self.lists.items():
            values, splits = asked.ids[name]
            found[name] = tf.RaggedTensor.from_row_splits(tf.constant(values + start, tf.int64), splits)
        return found


def build(settings: RankingMethod, encoding: Encoding, samples: int, seed: int) -> RankingModel:
    """Build and compile the model of a method, at its initial weights."""
    random.seed(seed)  # what Keras' layers take their seeds from
    tf.random.set_seed(seed)
    model = RankingModel(settings, encoding, samples, seed)
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
    model(model.layout.inputs(nothing), training=False)  # makes the weights
    # A checkpoint restores the optimizer's moments into existing variables, so they have to be built now.
    model.optimizer.build(model.trainable_variables)
    return model


def batches(
    model: RankingModel, asked: Examples, encoding: Encoding, size: int, order: tuple[int, int] | None = None
) -> tf.data.Dataset:
    """Return batches of inputs and labels.

    Args:
      model: The model.
      asked: The rows.
      encoding: The unit of labels.
      size: Rows in a batch.
      order: The seed of the rows' order and the first epoch, of which each has another order, without an end;
        None: the rows as they come, once.
    """
    inputs = model.layout.inputs(asked)
    labels = asked.labels if encoding.config.binary else (asked.labels - encoding.mean) / encoding.deviation
    answers = tf.constant(labels[:, np.newaxis], tf.float32)
    rows = tf.range(len(asked), dtype=tf.int64)

    def shuffled(number: tf.Tensor) -> tf.data.Dataset:
        key = tf.stack([tf.constant(order[0] if order else 0, tf.int64), number])
        drawn = tf.random.experimental.stateless_shuffle(rows, seed=key)
        return tf.data.Dataset.from_tensor_slices(drawn).batch(size)

    def read(chosen: tf.Tensor) -> tuple[dict[str, Any], tf.Tensor]:
        return {name: tf.gather(each, chosen) for name, each in inputs.items()}, tf.gather(answers, chosen)

    if order is None:
        return tf.data.Dataset.from_tensor_slices(rows).batch(size).map(read).prefetch(2)
    found = count_epochs(order[1]).flat_map(shuffled).map(read).prefetch(2)
    return found.apply(tf.data.experimental.assert_cardinality(-(-len(asked) // size)))


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
    model = build(settings, parts.encoding, len(parts.train), seed)
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
    model = build(settings, parts.encoding, len(parts.train), seed)
    fed = _fed(model, settings, seed, parts)
    return best_epoch.measure(model, _stopping(settings), *fed, report, callbacks)


def load_best(method: str, settings: RankingMethod, seed: int, *, parts: Parts, folder: Path) -> RankingModel:
    """Load the best epoch of a method.

    Raises:
      DataError: The method isn't trained to the end.
    """
    found: RankingModel = best_epoch.load_best(
        lambda: build(settings, parts.encoding, len(parts.train), seed),
        folder,
        _stopping(settings),
        f"{method}, seed {seed}",
    )
    return found


def _stopping(settings: RankingMethod) -> best_epoch.Stopping:
    return best_epoch.Stopping(LOGGED, False, settings.epochs, settings.patience)


def _fed(
    model: RankingModel, settings: RankingMethod, seed: int, parts: Parts
) -> tuple[best_epoch.Batches, tf.data.Dataset]:
    """Return what makes batches for training, and the batches of validation."""
    size = settings.rows_per_batch
    assert size is not None  # `RankingMethod.complete` has decided it
    return (
        lambda epoch: batches(model, parts.train, parts.encoding, size, (seed, epoch)),
        batches(model, parts.validation, parts.encoding, _ASKED),
    )


@dataclass(frozen=True)
class ModelScorer:
    """A trained model as a `gmeta.experiment.ranking.baselines.Scorer`."""

    model: RankingModel
    encoding: Encoding

    def scores(self, asked: Examples) -> Floats:
        """Compute logits, or labels, (rows,)."""
        found = []
        for begin in range(0, len(asked), _ASKED):
            part = asked.take(np.arange(begin, min(begin + _ASKED, len(asked))))
            found.append(self.model(self.model.layout.inputs(part), training=False).numpy()[:, 0])
        scores = np.concatenate([np.zeros(0), *found]).astype(np.float64)
        encoding = self.encoding
        return scores if encoding.config.binary else encoding.mean + encoding.deviation * scores
