"""The networks of an experiment on rows: the common embeddings of ids, DCN-v2, DLRM and FM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.plan.ranking_config import RankingMethod
from gmeta.experiment.ranking.examples import Encoding, Examples
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.models.zoo.dcn_model import DCNNetwork
from gmeta.models.zoo.dlrm_model import DLRMNetwork
from gmeta.optimizers import Adam, RowPrior

IDS, NUMBERS = "ids", "numbers"
_START = 0.05  # deviation of initial rows
_NOISE = 1.6  # twice the share of the labels' variance that models don't explain


class RowModel(Model):
    r"""The base of models of rows: embeddings of ids, and a weight for each id.

    .. math:: \hat y = b + \sum_f w_{x_f} + g(\dots)

    Subclasses define g. An unknown id, with the number 0, has no weight and a vector of zeros; training
    treats some ids as unknown. All ids are in one table, which a `RowPrior` shrinks towards zero.

    Args:
      settings: The network.
      encoding: The features and the numbers.
      samples: The number of rows in training.
      seed: The seed of initial weights and rows, and of dropout.
    """

    asked = 4096
    """How many rows are scored at once."""

    def __init__(self, settings: RankingMethod, encoding: Encoding, samples: int, seed: int) -> None:
        super().__init__(name="ranking")
        s, self.layout = settings, Layout.of(encoding)
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

    def inputs_of(self, asked: Examples) -> dict[str, Any]:
        """Return the model's inputs, with a row for each row of the examples."""
        return self.layout.inputs(asked)

    def groups(self, asked: Examples) -> tuple[Ints, Ints] | None:
        """Return the groups of rows that should share a batch.

        Returns:
          The rows, group after group, (rows,), and the groups' offsets, (groups + 1,). None: any rows may
          share a batch.
        """
        return None

    def embed(self, inputs: Mapping[str, Any], training: bool | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Look up the ids of rows.

        Returns:
          The sum of each row's weights, (samples, 1), and the vectors of its features, (samples, features,
          dim).
        """
        ids = inputs[IDS]
        known = self.layout.numbered(ids)
        if training and self.unknown:
            known &= tf.random.uniform(tf.shape(ids), seed=self.seed) >= self.unknown
        lists = {name: inputs[name] for name in self.layout.lists}
        found = self.collection({IDS: ids, **lists})
        rows = found[IDS] * tf.cast(known, tf.float32)[..., tf.newaxis]
        if lists:
            rows = tf.concat([rows, tf.stack([found[name] for name in lists], axis=1)], axis=1)
        return tf.reduce_sum(rows[..., 0], axis=1, keepdims=True) + self.bias, rows[..., 1:]


class RankingModel(RowModel):
    r"""A network on the embeddings and numbers of a row.

    .. math:: \hat y = b + \sum_f w_{x_f} + g(v_{x_1}, \dots, v_{x_n}, z)

    z are the numbers of a row, and g is the network of DCN-v2 or DLRM, or half the sum of products of all
    pairs of vectors, as in factorisation machines (Rendle, 2010), where each number also has a vector.

    Args:
      settings: As for `RowModel`.
      encoding: As for `RowModel`.
      samples: As for `RowModel`.
      seed: As for `RowModel`.

    Shapes:
      {"ids": (samples, features) int64, a list's name: ragged int64, "numbers": (samples, columns)} ->
      (samples, 1): logits, or labels minus their mean in units of their deviation.
    """

    def __init__(self, settings: RankingMethod, encoding: Encoding, samples: int, seed: int) -> None:
        super().__init__(settings, encoding, samples, seed)
        s = settings
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
        numbers = inputs[NUMBERS]
        linear, vectors = self.embed(inputs, training)
        vectors = self.drop(vectors, training=training)
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
      single: Feature with one id per row -> the key of its number 0, which no row has.
      lists: Feature with lists of ids -> likewise.
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
        """Return a mask of the keys, (samples, features), of known ids."""
        return keys > tf.constant([*self.single.values()], tf.int64)

    def inputs(self, asked: Examples) -> dict[str, Any]:
        """Return the model's inputs."""
        keys = [np.asarray(asked.ids[name]) + start for name, start in self.single.items()]
        found: dict[str, Any] = {
            IDS: tf.constant(np.stack(keys, axis=1) if keys else np.zeros((len(asked), 0)), tf.int64),
            NUMBERS: tf.constant(asked.numbers),
        }
        for name, start in self.lists.items():
            values, splits = asked.ids[name]
            found[name] = tf.RaggedTensor.from_row_splits(tf.constant(values + start, tf.int64), splits)
        return found
