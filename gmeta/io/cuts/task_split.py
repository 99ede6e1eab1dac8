"""Cuts the groups of an element into support and query sets, all at once.

Rules choose a task's query rows: by number, by share of the task, by time (`After`), or by a flag (`Flag`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number
from gmeta.core.schema import Schema
from gmeta.core.shares import splitmix64_tensor
from gmeta.io.cuts.task_choice import About, left_out, refuse_unsound
from gmeta.io.reader_stats import ReaderStats


@dataclass(frozen=True)
class After:
    """A rule by time: rows at or after it are query rows, earlier rows are support rows.

    Attributes:
      column: A column of one number per row, such as the column by which tasks are sorted. It is a feature
        only if ``features`` names it.
      time: The first time of the query set, in the column's own unit.
      until: For `gmeta.io.sequences`: rows at or after this time are skipped, so that validation doesn't see
        the rows of the test. None: no row is skipped. With ``until=time``, no row is a query row: sequences
        contain only earlier rows, to train on.

    Example:
      >>> tasks("data/train", query=After("timestamp", 978_300_000))  # doctest: +SKIP
    """

    column: str
    time: float
    until: float | None = None

    @property
    def asks(self) -> bool:
        """Whether any row can be a query row."""
        return self.until is None or self.until > self.time

    def choose(self, values: tf.Tensor) -> tf.Tensor:
        """Mark the query rows, by the column's values."""
        return _from(values, self.time) & self.keeps(values)

    def keeps(self, values: tf.Tensor) -> tf.Tensor:
        """Mark the rows before ``until``, by the column's values."""
        return tf.ones_like(values, tf.bool) if self.until is None else ~_from(values, self.until)


def _from(values: tf.Tensor, time: float) -> tf.Tensor:
    if values.dtype.is_integer:
        return values >= tf.constant(math.ceil(time), values.dtype)
    return tf.cast(values, tf.float64) >= tf.constant(time, tf.float64)


@dataclass(frozen=True)
class Flag:
    """A rule by flag: rows whose flag isn't 0 are query rows.

    Attributes:
      column: An int64 column of one value per row.

    Example:
      >>> tasks("data/train", query=Flag("is_query"))  # doctest: +SKIP
    """

    column: str

    def choose(self, values: tf.Tensor) -> tf.Tensor:
        """Mark the query rows, by the column's values."""
        return values != 0


Query: TypeAlias = int | float | After | Flag
"""What `gmeta.io.tasks` takes for ``query``, and `gmeta.io.sequences` for ``exposed``."""


def check_query(query: Query, schema: Schema, what: str = "tasks: query") -> Query:
    """Return a rule unchanged if it is valid and fits the columns.

    Args:
      query: The rule.
      schema: The columns that it may name.
      what: The rule's name in an error.

    Raises:
      ConfigError: The value isn't a rule, is a number out of range, or names an unsuitable column.
    """
    if isinstance(query, After | Flag):
        column = schema[query.column]
        wrong = column.is_list or column.name in (schema.task, schema.batch)
        if wrong or (isinstance(query, Flag) and column.dtype != "int64"):
            kind = "an int64 column" if isinstance(query, Flag) else "a column"
            raise ConfigError(f"{what}={query} must name {kind} of one value a record that is no key")
        if isinstance(query, After):
            finite_number(f"{what}={query}: the time", query.time)
            if query.until is not None:
                until = finite_number(f"{what}={query}: until", query.until)
                if until < query.time:
                    raise ConfigError(f"{what}={query}: until must be at least the time, got {until:g}")
        return query
    if isinstance(query, int | np.integer) and not isinstance(query, bool) and query >= 1:
        return int(query)
    if isinstance(query, float) and 0 < query < 1:
        return query
    raise ConfigError(
        f"{what}={query!r} must be at least 1 row, a share of a task's rows above 0 and below 1, "
        "an After or a Flag"
    )


def least_rows(query: Query) -> int:
    """Return the minimum number of rows of a task that can be split: one on each side, or ``query`` + 1."""
    return query + 1 if isinstance(query, int) else 2


def query_rows(query: Query, columns: Mapping[str, Any], lengths: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """Count the query rows of each task, and mark them if the rule defines which rows they are.

    A share q of n rows is ``floor(q n + 1/2)`` rows in float64, at least 1 and at most n - 1.

    Args:
      query: The rule.
      columns: The columns of the tasks' rows.
      lengths: (T,) int64 rows of each task.

    Returns:
      (T,) int64 counts; and (rows,) bool marks, or None if the rule doesn't define which rows they are.
    """
    if isinstance(query, After | Flag):
        chosen = query.choose(columns[query.column])
        tasks = tf.size(lengths)
        task = tf.repeat(tf.range(tasks), lengths)
        return tf.math.unsorted_segment_sum(tf.cast(chosen, tf.int64), task, tasks), chosen
    if isinstance(query, int):
        return tf.fill(tf.shape(lengths), tf.constant(query, tf.int64)), None
    nearest = tf.floor(tf.cast(lengths, tf.float64) * query + 0.5)
    return tf.clip_by_value(tf.cast(nearest, tf.int64), 1, lengths - 1), None


# Orders of the rows inside each task, computed for all tasks of an element at once.
#
# The order within a task depends on that task alone, not on the other tasks of the element, and therefore not
# on the ranks or the batch size.


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
    """A function from an element of `gmeta.io.groups` to an element of `gmeta.io.tasks`.

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
    return tf.reduce_max(tf.concat([lengths, [1]], axis=0))  # 1 without tasks


def _at(values: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Gather values; if there are no values, the index may contain only padding."""
    return tf.gather(tf.concat([values, tf.zeros([1], values.dtype)], axis=0), index)
