"""Cuts the groups of an element into support and query sets, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.schema import Schema

Rows = Literal["latest", "random"]
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class TaskSplit:
    """A function from an element of `gmeta.io.groups` to one of `gmeta.io.tasks`, which describes its fields.

    Raises:
      ConfigError: ``rows`` is another word than these.
    """

    schema: Schema
    features: Sequence[str]
    label: str
    weight: str | None
    query: int
    support: int | None
    rows: Rows
    pad_value: int | None
    seed: int

    def __post_init__(self) -> None:
        if self.rows not in get_args(Rows):
            raise ConfigError(f"tasks: rows must be one of {', '.join(get_args(Rows))}, got {self.rows!r}")

    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        """The task batch."""
        columns, splits = element["columns"], element["row_splits"]
        starts, lengths = splits[:-1], splits[1:] - splits[:-1]
        if self.schema.task in self.features:
            columns = {**columns, self.schema.task: tf.repeat(element["task"], lengths)}
        before_query = lengths - self.query
        support = before_query if self.support is None else tf.minimum(before_query, self.support)
        order = _order(element, lengths, self.seed) if self.rows == "random" else None
        weights = None if self.weight is None else columns[self.weight]

        def part(start: tf.Tensor, length: tf.Tensor, longest: Any) -> dict[str, tf.Tensor]:
            real = tf.sequence_mask(length, longest)
            index = tf.where(real, start[:, None] + tf.range(tf.cast(longest, tf.int64)), 0)
            if order is not None:
                index = tf.where(real, _at(order, index), 0)
            mask = tf.cast(real, tf.float32)
            return {"index": index, "mask": mask if weights is None else mask * _at(weights, index)}

        longest = tf.reduce_max(tf.concat([support, [1]], axis=0))  # 1 where there is no task
        queries = tf.fill(tf.shape(support), tf.constant(self.query, tf.int64))
        return {
            "features": {name: self._feature(columns[name]) for name in self.features},
            "label": tf.cast(columns[self.label], tf.float32),
            "task": element["task"],
            "support": part(starts + before_query - support, support, longest),
            "query": part(starts + before_query, queries, self.query),
        }

    def _feature(self, values: Any) -> Any:
        if self.pad_value is None or not isinstance(values, tf.RaggedTensor):
            return values
        return values.to_tensor(tf.cast(self.pad_value, values.dtype))


def _at(values: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """``tf.gather``, of an index that has nothing but padding where there are no values."""
    return tf.gather(tf.concat([values, tf.zeros([1], values.dtype)], axis=0), index)


def _order(element: dict[str, Any], lengths: tf.Tensor, seed: int) -> tf.Tensor:
    """Rows, group by group, in each group in an order drawn for (seed, epoch, task, batch).

    A row's place is that of its hash among its group's: what other groups are in the element has no part in
    it, so ranks and batch sizes don't either.
    """
    group = tf.repeat(tf.range(tf.size(lengths)), lengths)
    row = tf.range(tf.size(group, tf.int64)) - tf.repeat(element["row_splits"][:-1], lengths)
    state = tf.zeros_like(row, tf.uint64)
    for value in (tf.constant(seed, tf.int64), element["epoch"]):
        state = _mix(tf.bitwise.bitwise_xor(state, tf.bitcast(tf.zeros_like(row) + value, tf.uint64)))
    for values in (tf.repeat(element["task"], lengths), tf.repeat(element["batch_id"], lengths), row):
        state = _mix(tf.bitwise.bitwise_xor(state, tf.bitcast(values, tf.uint64)))
    by_hash = tf.argsort(tf.bitcast(state, tf.int64), stable=True)
    return tf.cast(tf.gather(by_hash, tf.argsort(tf.gather(group, by_hash), stable=True)), tf.int64)


def _mix(x: tf.Tensor) -> tf.Tensor:
    """splitmix64's finaliser."""
    x = x + tf.constant(_ODD, tf.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = _xor_shifted(x, shift) * tf.constant(factor, tf.uint64)
    return _xor_shifted(x, 31)


def _xor_shifted(x: tf.Tensor, places: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(places, tf.uint64)))
