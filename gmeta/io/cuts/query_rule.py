"""Rules that choose a task's query rows: by number, by share of the task, by time, or by a flag."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number
from gmeta.core.schema import Schema


@dataclass(frozen=True)
class After:
    """A rule by time: rows at or after it are query rows, earlier rows are support rows.

    Attributes:
      column: A column of one number a row, such as the one that tasks are sorted by. It is a feature only if
        ``features`` names it.
      time: The first time of the query set, in the column's own unit.
      until: For `gmeta.io.sequences`: rows at or after this time are left out, so that validation doesn't see
        the rows of the test. None: no row is left out. With ``until=time`` no row is a query row: a sequence
        is what came before, to train on.

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
      column: An int64 column of one value a row.

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
      ConfigError: The value is no rule, is a number out of range, or names an unsuitable column.
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
    """Return the fewest rows of a task that can be split: one on each side, or ``query`` rows and one."""
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
