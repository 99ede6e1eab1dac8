"""Cutting the groups of an element into support and query sets, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.schema import Schema
from gmeta.core.shares import splitmix64_tensor
from gmeta.io.cuts.query_rule import After, Flag, Query, query_rows
from gmeta.io.cuts.task_choice import About, left_out, refuse_unsound
from gmeta.io.reader_stats import ReaderStats

# Orders of the rows inside each task, computed for all tasks of an element at once.
#
# The order within a task depends on that task alone. The other tasks of the element have no influence, and so
# the ranks and the batch size have none either.


def order_marked_last(marked: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Order rows by task, and within each task those that aren't ``marked`` (rows,) before those that are."""
    task = tf.repeat(tf.range(tf.size(lengths, tf.int64)), lengths)
    return tf.cast(tf.argsort(2 * task + tf.cast(marked, tf.int64), stable=True), tf.int64)


def draw_order(element: dict[str, Any], lengths: tf.Tensor, seeds: Sequence[Any]) -> tf.Tensor:
    """Order rows by task, and within each task in an order drawn for (``seeds``, task, batch).

    Rows of a task are sorted by their hashes.

    Args:
      element: An element of `gmeta.io.groups`.
      lengths: (T,) int64 rows of each task.
      seeds: int64 scalars.

    Returns:
      (rows,) int64.
    """
    group = tf.repeat(tf.range(tf.size(lengths)), lengths)
    row = tf.range(tf.size(group, tf.int64)) - tf.gather(element["row_splits"], group)
    of_rows = (tf.gather(element["task"], group), tf.gather(element["batch_id"], group), row)
    state = tf.zeros_like(row, tf.uint64)
    for values in (*(tf.zeros_like(row) + seed for seed in seeds), *of_rows):
        state = splitmix64_tensor(tf.bitwise.bitwise_xor(state, tf.bitcast(values, tf.uint64)))
    by_hash = tf.argsort(tf.bitcast(state, tf.int64), stable=True)
    return tf.cast(tf.gather(by_hash, tf.argsort(tf.gather(group, by_hash), stable=True)), tf.int64)


Rows = Literal["latest", "random"]


@dataclass(frozen=True)
class TaskSplit:
    """A function from an element of `gmeta.io.groups` to one of `gmeta.io.tasks`, which describes its fields.

    Raises:
      ConfigError: ``rows`` has an unknown value, or contradicts ``query`` or ``resample``.
    """

    path: str
    schema: Schema
    features: Sequence[str]
    label: str | Sequence[str]
    weight: str | None
    query: Query
    support: int | None
    rows: Rows | None
    resample: bool
    pad_value: int | None
    seed: int
    skip: bool
    stats: ReaderStats | None

    def __post_init__(self) -> None:
        if self.rows not in (None, *get_args(Rows)):
            raise ConfigError(f"tasks: rows must be one of {', '.join(get_args(Rows))}, got {self.rows!r}")
        if self.rows == "latest" and self.resample:
            raise ConfigError("tasks: resample=True redraws rows in each epoch: leave out rows='latest'")
        if isinstance(self.query, After | Flag) and self._random:
            raise ConfigError(
                f"tasks: query={self.query} defines the query rows: leave out rows and resample"
            )

    @property
    def _random(self) -> bool:
        return self.resample or self.rows == "random"

    @tf.autograph.experimental.do_not_convert  # no Python branch on a tensor, so tracing is quicker
    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        """Return the task batch of an element."""
        lengths = _lengths(element)
        queries, chosen = query_rows(self.query, element["columns"], lengths)
        if chosen is not None:
            sound = (queries > 0) & (queries < lengths)
            if self.skip:
                element, chosen = left_out(element, chosen, sound, queries, self.stats, self._about)
                lengths, queries = _lengths(element), tf.boolean_mask(queries, sound)
            else:
                element = refuse_unsound(element, sound, queries, self._about)
        order = self._order(element, lengths, chosen)
        columns, starts = element["columns"], element["row_splits"][:-1]
        if self.schema.task in self.features:
            columns = {**columns, self.schema.task: tf.repeat(element["task"], lengths)}
        before_query = lengths - queries
        support = before_query if self.support is None else tf.minimum(before_query, self.support)
        weights = None if self.weight is None else columns[self.weight]

        def part(start: tf.Tensor, length: tf.Tensor, longest: Any) -> dict[str, tf.Tensor]:
            real = tf.sequence_mask(length, longest)
            index = tf.where(real, start[:, None] + tf.range(tf.cast(longest, tf.int64)), 0)
            if order is not None:
                index = tf.where(real, _at(order, index), 0)
            mask = tf.cast(real, tf.float32)
            return {"index": index, "mask": mask if weights is None else mask * _at(weights, index)}

        most = self.query if isinstance(self.query, int) else _longest(queries)
        return {
            "features": {name: self._feature(columns[name]) for name in self.features},
            "label": self._label(columns),
            "task": element["task"],
            "support": part(starts + before_query - support, support, _longest(support)),
            "query": part(starts + before_query, queries, most),
        }

    @property
    def _about(self) -> About:
        """The path and the rule, for messages about tasks that can't be split."""
        return About(self.path, str(self.query))

    def _order(self, element: dict[str, Any], lengths: tf.Tensor, chosen: Any) -> Any:
        """Order the rows, support before query in each task; None keeps their order."""
        if chosen is not None:
            return order_marked_last(chosen, lengths)
        if not self._random:
            return None
        seed = tf.constant(self.seed, tf.int64)
        return draw_order(element, lengths, [seed, element["epoch"]] if self.resample else [seed])

    def _label(self, columns: dict[str, Any]) -> tf.Tensor:
        if isinstance(self.label, str):
            return tf.cast(columns[self.label], tf.float32)
        return tf.stack([tf.cast(columns[name], tf.float32) for name in self.label], axis=1)

    def _feature(self, values: Any) -> Any:
        if self.pad_value is None or not isinstance(values, tf.RaggedTensor):
            return values
        return values.to_tensor(tf.cast(self.pad_value, values.dtype))


def _lengths(element: dict[str, Any]) -> tf.Tensor:
    return element["row_splits"][1:] - element["row_splits"][:-1]


def _longest(lengths: tf.Tensor) -> tf.Tensor:
    return tf.reduce_max(tf.concat([lengths, [1]], axis=0))  # 1 where there is no task


def _at(values: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Gather values; with no values at all, the index may hold padding only."""
    return tf.gather(tf.concat([values, tf.zeros([1], values.dtype)], axis=0), index)
