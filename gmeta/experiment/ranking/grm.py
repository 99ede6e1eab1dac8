r"""GRM on rows: reads the earlier rows of a row's user, with their labels, as a sequence.

As in MTGenRec (section 2; `gmeta.models.GRM`), a row is a target after its user's history: the training rows
:math:`x_s` of the same user with their labels :math:`y_s`, and events without labels,

.. math::
   H = \mathrm{trunk}([(x_s, y_s) : t_s < t \mid x]), \quad
   \hat y = b + \sum_f w_{x_f} + \mathrm{tower}(\mathrm{MMoE}(H))

A row sees only the rows of its history with an earlier time: neither itself, nor a row of the same time, nor
a later one. So its prediction is a function of what was known before it, and doesn't depend on the other rows
of a batch. With the protocol ``"time"``, a test row sees all training rows of its user; with ``"random"``,
those before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.plan.ranking_config import RankingMethod
from gmeta.experiment.ranking.examples import Encoding, Examples
from gmeta.experiment.ranking.networks import NUMBERS, RowModel
from gmeta.layers import MMoE
from gmeta.layers.task_heads import TaskHeads
from gmeta.models.sequence.exposure_trunk import ExposureTrunk, make_backbone
from gmeta.models.sequence.sequence_columns import Layout, SequenceColumns
from gmeta.ops import AttentionMask

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
    """Predicts a row from its user's history: HSTU or FuXi-α, a mixture of experts, and a tower.

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

    def _histories_of(self, users: tf.Tensor, times: tf.Tensor) -> tuple[tf.Tensor, Layout]:
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
        layout = Layout(
            past.row_splits,
            tf.concat([[tf.constant(0, tf.int64)], ends], axis=0),
            tf.gather(self.histories.times, past.flat_values),
            times,
        )
        return past.flat_values, layout
