"""The models of an experiment on rows: the common embeddings of ids, DCN-v2, DLRM and FM, and GRM."""

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
from gmeta.layers import EmbeddingCollection, FeatureConfig, MMoE, TableConfig
from gmeta.layers.task_heads import TaskHeads
from gmeta.models import Model
from gmeta.models.sequence.exposure_trunk import ExposureTrunk, make_backbone
from gmeta.models.sequence.sequence_columns import Layout as SequenceLayout
from gmeta.models.sequence.sequence_columns import SequenceColumns
from gmeta.models.zoo.dcn_model import DCNNetwork
from gmeta.models.zoo.dlrm_model import DLRMNetwork
from gmeta.ops import AttentionMask
from gmeta.optimizers import Adam, RowPrior

IDS, NUMBERS = "ids", "numbers"
NEW = "/new"
"""An input of models that continue on a stream: (samples, features, dim + 1), rows of ids that the encoding
lacks, and zeros for others, which are added to the features' own."""
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
        rows = rows + inputs[NEW] if NEW in inputs else rows
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


USER, TIME = "/user", "/time"
"""Inputs: the number of a row's user, and its time. No column has such a name."""

_ROW, _ANSWER, _LABEL = "row", "answer", "label"
_ASKED = 512  # rows at once, each with a history
_HORIZON = 100.0  # times the median gap between two rows of a user


@dataclass(frozen=True)
class Histories:
    """Training rows and events, user after user, by time.

    Attributes:
      inputs: The inputs of `RowModel.embed`, and ``"numbers"``.
      answers: (rows, 2) the standardised label and 1; for an event, 0 and 0.
      times: (rows,).
      splits: (users + 2,) offsets of the rows of each user's number.
      clock: (times,) the distinct times, ascending.
      keys: (rows,) the user and the place of the time in the clock as one number, ascending.
    """

    inputs: Mapping[str, Any]
    answers: tf.Tensor
    times: tf.Tensor
    splits: tf.Tensor
    clock: tf.Tensor
    keys: tf.Tensor

    @classmethod
    def of(cls, history: Examples, encoding: Encoding, model: RowModel) -> Histories:
        """Sort the rows of histories."""
        user = _user(encoding)
        history = history.take(history.by_user(user))
        users, clock = np.asarray(history.ids[user]), np.unique(history.times)
        known, mean = ~np.isnan(history.labels), encoding.mean
        deviation = np.sqrt(mean * (1 - mean)) if encoding.config.binary else encoding.deviation
        answers = np.where(known, (history.labels - mean) / deviation, 0.0)
        return cls(
            model.layout.inputs(history),
            tf.constant(np.stack([answers, known], axis=1), tf.float32),
            tf.constant(history.times, tf.int64),
            tf.constant(np.searchsorted(users, np.arange(encoding.sizes[user] + 1)), tf.int64),
            tf.constant(clock, tf.int64),
            tf.constant(users * (len(clock) + 1) + np.searchsorted(clock, history.times), tf.int64),
        )

    def earlier(self, users: tf.Tensor, times: tf.Tensor) -> tf.Tensor:
        """Return the place of a user's first row that isn't earlier than a time, (samples,) int64."""
        tick = tf.searchsorted(self.clock, times, out_type=tf.int64)
        key = users * (tf.size(self.clock, tf.int64) + 1) + tick
        return tf.searchsorted(self.keys, key, out_type=tf.int64)


def _user(encoding: Encoding) -> str:
    user = encoding.config.user
    assert user is not None  # `RankingConfig` checks it
    return user


class SequenceModel(RowModel):
    r"""GRM on rows: reads the earlier rows of a row's user, with their labels, as a sequence.

    As in MTGenRec (section 2; `gmeta.models.GRM`), a row is a target after its user's history: the training
    rows :math:`x_s` of the same user with their labels :math:`y_s`, and events without labels,

    .. math::
       H = \mathrm{trunk}([(x_s, y_s) : t_s < t \mid x]), \quad
       \hat y = b + \sum_f w_{x_f} + \mathrm{tower}(\mathrm{MMoE}(H))

    The trunk is HSTU or FuXi-α. A row sees only the rows of its history with an earlier time: neither itself,
    nor a row of the same time, nor a later one. So its prediction is a function of what was known before it,
    and doesn't depend on the other rows of a batch. With the protocol ``"time"``, a test row sees all
    training rows of its user; with ``"random"``, those before it.

    The histories are a part of the model, but not weights: they are read from the data. Rows of one user
    share one pass over the history; rows may come in any order.

    Args:
      settings: As for `RowModel`.
      encoding: As for `RowModel`.
      samples: As for `RowModel`.
      history: The training rows, and events.
      seed: As for `RowModel`.

    Shapes:
      {"ids": (samples, features) int64, a list's name: ragged int64, "numbers": (samples, columns), "/user":
      (samples,) int64, "/time": (samples,) int64} -> (samples, 1), as of `RankingModel`.
    """

    asked = _ASKED

    def __init__(
        self, settings: RankingMethod, encoding: Encoding, samples: int, history: Examples, seed: int
    ) -> None:
        super().__init__(settings, encoding, samples, seed)
        s, self.user = settings, _user(encoding)
        self.histories = Histories.of(history, encoding, self)
        self.longest, self.blocks = s.longest, s.blocks
        rows = len(history) / max(len(np.unique(np.asarray(history.ids[self.user]))), 1)
        self.trunk = ExposureTrunk(
            make_backbone(
                s.backbone,
                dim=s.width,
                blocks=s.blocks,
                heads=s.heads,
                max_length=max(min(s.longest, round(rows)), 1),
                timed=True,
                mask=AttentionMask(by_time=True, window=s.longest),
                horizon=_HORIZON * history.median_gap(self.user) if s.backbone == "hstu" else None,
                dropout=s.dropout,
                seed=seed,
            ),
            SequenceColumns((), (_ROW, _ANSWER), (_ROW,), time=TIME),
            {_ROW: len(self.layout.names) * s.dim + len(self.layout.numbers), _ANSWER: 2},
            dim=s.width,
            dropout=s.dropout,
            seed=seed,
        )
        self.mixture = MMoE(
            [_LABEL], experts=s.experts, units=s.hidden[:1], report=None, seed=seed, name="mixture"
        )
        self.heads = TaskHeads([_LABEL], units=s.hidden[1:], seed=seed, name="heads")

    def inputs_of(self, asked: Examples) -> dict[str, Any]:
        """Return the model's inputs, with each row's user and time."""
        return {
            **super().inputs_of(asked),
            USER: tf.constant(np.asarray(asked.ids[self.user]), tf.int64),
            TIME: tf.constant(asked.times, tf.int64),
        }

    def groups(self, asked: Examples) -> tuple[Ints, Ints]:
        """Return the rows user after user; a user with many rows is in several groups."""
        order = asked.by_user(self.user)
        users = np.asarray(asked.ids[self.user])[order]
        begin = np.searchsorted(users, users)  # of the row's user
        place = np.arange(len(users)) - begin
        return order, np.append(np.flatnonzero(place % self.longest == 0), len(users))

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Compute the outputs of rows."""
        order = tf.argsort(inputs[TIME], stable=True)
        order = tf.gather(order, tf.argsort(tf.gather(inputs[USER], order), stable=True))
        asked = {name: tf.gather(each, order) for name, each in inputs.items()}
        past, layout = self._histories_of(asked.pop(USER), asked.pop(TIME))
        known = self.histories.inputs
        whole = {
            name: tf.concat([tf.gather(known[name], past), each], axis=0) for name, each in asked.items()
        }
        linear, vectors = self.embed(whole, training)
        rows = tf.reshape(vectors, [-1, vectors.shape[1] * vectors.shape[2]])
        of_rows = {
            _ROW: tf.concat([rows, whole[NUMBERS]], axis=1),
            _ANSWER: tf.gather(self.histories.answers, past),
        }
        hidden = self.trunk(of_rows, layout, training=training)
        found = self.heads(self.mixture(hidden))[_LABEL][:, tf.newaxis] + linear[tf.size(past) :]
        return tf.gather(found, tf.math.invert_permutation(order))

    def _histories_of(self, users: tf.Tensor, times: tf.Tensor) -> tuple[tf.Tensor, SequenceLayout]:
        """Return the training rows that come before sorted rows, and the layout of both.

        A user's training rows range from before its first row to before its last one; the mask selects among
        them for each row. Each block looks back by ``longest`` rows, so earlier rows have no influence.
        """
        distinct, _, counts = tf.unique_with_counts(users, out_idx=tf.int64)
        ends = tf.cumsum(counts)
        before = self.histories.earlier(users, times)
        first, last = tf.gather(before, ends - counts), tf.gather(before, ends - 1)
        begin, least = first, tf.gather(self.histories.splits, distinct)
        for _ in range(self.blocks):  # a row sees only rows before its own time
            begin = tf.maximum(begin - self.longest, least)
            when = tf.gather(
                self.histories.times, tf.minimum(begin, tf.size(self.histories.times, tf.int64) - 1)
            )
            begin = tf.minimum(begin, self.histories.earlier(distinct, when))
        past = tf.ragged.range(begin, last)
        layout = SequenceLayout(
            past.row_splits,
            tf.concat([[tf.constant(0, tf.int64)], ends], axis=0),
            tf.gather(self.histories.times, past.flat_values),
            times,
        )
        return past.flat_values, layout
