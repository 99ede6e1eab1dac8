"""Joins an example's history: the events in the store, and the tail in the example."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.history_manifest import BIRTH
from gmeta.core.native import load_op_library
from gmeta.core.schema import OnBad, Schema
from gmeta.io.histories.store import HistoryStore
from gmeta.io.reader_stats import ReaderStats

# The checksum of histories in a graph.


def history_crc_of_ragged(columns: Sequence[tf.RaggedTensor]) -> tf.Tensor:
    """Compute the checksum of each history: the CRC-32C of its columns, one after another.

    Every value is a little-endian word of 64 bits; a float32 is its bits, zero-extended. A ranker logs the
    checksum with the exposure, and ``late(check="crc")`` compares the history with it.
    `gmeta.preprocess.history.shard_reader.history_crc_of_splits` computes the same without TensorFlow.

    Args:
      columns: RaggedTensors (R, None), int64 or float32, all with the same row splits, in the order in which
        `late` names them.

    Returns:
      (R,) int64, from 0 to 2^32 - 1; 0 for a history without events.

    Raises:
      ConfigError: There is no column, or one isn't a RaggedTensor (R, None) of int64 or float32.
      tf.errors.InvalidArgumentError: A column has a different number of values than the first.

    Example:
      >>> items = tf.ragged.constant([[7, 9], []], tf.int64)
      >>> prices = tf.ragged.constant([[0.5, 2.0], []], tf.float32)
      >>> history_crc_of_ragged([items, prices]).numpy().tolist()
      [1671835289, 0]

    References:
      Versioned Late Materialization, section 3.3.
    """
    if not columns:
        raise ConfigError("history_crc_of_ragged: columns is empty: name the columns that the ranker read")
    for number, column in enumerate(columns):
        is_ragged = isinstance(column, tf.RaggedTensor) and column.ragged_rank == 1 and column.shape.rank == 2
        if not is_ragged or column.dtype not in (tf.int64, tf.float32):
            raise ConfigError(
                f"history_crc_of_ragged: column {number} must be a RaggedTensor (R, None) of int64 or "
                f"float32, got {column!r}"
            )
    splits = tf.cast(columns[0].row_splits, tf.int64)
    crcs: tf.Tensor = load_op_library("io").gmeta_history_crc(
        row_splits=splits, columns=[column.values for column in columns]
    )
    return crcs


# Compares rebuilt histories with those that the ranker logged.

CRC_COLUMN = "history_crc"
"""The examples' column with the checksum of the history that the ranker saw (`history_crc_of_ragged`)."""
LENGTH_COLUMN = "history_length"
"""The examples' column with the number of events of the history that the ranker saw."""
Check = Literal["crc", "length"]


def need_numbers(schema: Schema, name: str, why: str) -> None:
    """Check that the examples have an int64 column of this name.

    Raises:
      ConfigError: They don't.
    """
    found: object = f"no {name!r}"
    if name in schema:
        found = schema[name]
        if schema[name].dtype == "int64" and not schema[name].is_list:
            return
    raise ConfigError(
        f"late: {why}, an int64 column of what the ranker saw, and the examples have {found}: log it, or "
        "name another column"
    )


@dataclass(frozen=True)
class LoggedCheck:
    """A function that refuses examples whose histories differ from the ranker's.

    Attributes:
      check: What is compared.
      column: The examples' column with the ranker's number.
      longest: The maximum number of events of a history; longer logged lengths count as this length.
      examples: The examples, for messages.
      store: The store, for messages.
      on_bad: ``"skip"`` skips such an example, and counts it.
      stats: The counters.

    Raises:
      ConfigError: ``check`` is neither.
    """

    check: Check
    column: str
    longest: int | None
    examples: str
    store: str
    on_bad: OnBad
    stats: ReaderStats | None

    def __post_init__(self) -> None:
        if self.check not in get_args(Check):
            raise ConfigError(f"late: check must be 'crc', 'length' or None, got {self.check!r}")

    def __call__(
        self, batch: dict[str, Any], generations: tf.Tensor, logged: tf.Tensor, rows: tf.Tensor
    ) -> dict[str, Any]:
        """Return the batch without the examples whose histories differ from those `logged`, (B,).

        `rows` (B,) is the number of records to count for each example.
        """
        histories = list(batch["history"].values())
        if self.check == "crc":
            found = history_crc_of_ragged(histories)
        else:
            found = histories[0].row_lengths()
            logged = logged if self.longest is None else tf.minimum(logged, self.longest)
        sound = load_op_library("io").gmeta_check_histories(
            users=batch["task"],
            generations=generations,
            rows=rows,
            found=found,
            logged=logged,
            examples=self.examples,
            store=self.store,
            check=self.check,
            on_bad=self.on_bad,
            stats=0 if self.stats is None else self.stats.id,
        )
        if self.on_bad == "raise":  # all are sound; "task" depends on the check
            return {**batch, "task": tf.boolean_mask(batch["task"], sound)}

        def sound_ones() -> dict[str, Any]:
            kept = tf.where(sound)[:, 0]
            return tf.nest.map_structure(lambda part: tf.gather(part, kept), batch)

        return tf.cond(tf.reduce_all(sound), lambda: batch, sound_ones)


# Examples of users whose events were deleted: they are skipped and counted.


def leave_out_deleted(
    batch: dict[str, Any], deleted: tf.Tensor, rows: tf.Tensor, stats: ReaderStats | None, store: str
) -> dict[str, Any]:
    """Return the batch without the examples of deleted users.

    Args:
      batch: A batch of B sequences.
      deleted: (B,) bool: whether the user's events were deleted.
      rows: (B,) int64: the records of each example.
      stats: The counters, which count these examples as ``"deleted"``.
      store: The store, for messages.
    """

    def the_others() -> dict[str, Any]:
        dependencies = []
        if stats is not None:
            users = tf.strings.as_string(tf.boolean_mask(batch["task"], deleted))
            lines = tf.strings.join([f"gmeta: {store}: events of user ", users, " were deleted"])
            count = functools.partial(stats.leave_out, "deleted")
            dependencies = [tf.numpy_function(count, [tf.boolean_mask(rows, deleted), lines], tf.int64)]
        with tf.control_dependencies(dependencies):
            kept = tf.where(~deleted)[:, 0]
        return tf.nest.map_structure(lambda part: tf.gather(part, kept), batch)

    return tf.cond(tf.reduce_any(deleted), the_others, lambda: batch)


@dataclass(frozen=True)
class HistoryPlan:
    """A function that adds histories to a batch of exposures; `gmeta.io.late` describes its attributes.

    Raises:
      ConfigError: A column isn't in the store, or the tail lacks a column.
    """

    store: HistoryStore
    history: Sequence[str]
    time: str
    generation: str | None
    tail: Mapping[str, str]
    longest: int | None
    window: int | None
    targets: Sequence[str]
    on_bad: OnBad
    stats: ReaderStats | None
    check: LoggedCheck | None

    def __post_init__(self) -> None:
        if isinstance(self.history, str) or not self.history:
            raise ConfigError(f"late: history must be a list of the store's columns, got {self.history!r}")
        if self.longest is not None:
            whole_number("late: longest", self.longest, least=1)
        if self.window is not None:
            whole_number("late: window", self.window, least=1)
        self.store.check(self.read)
        if self.tail and set(self.tail) != set(self.read):
            raise ConfigError(
                f"late: the tail has columns {', '.join(sorted(self.tail))}, and needs those of the history "
                f"and the store's time: {', '.join(self.read)}"
            )
        if BIRTH in self.tail:
            raise ConfigError(f"late: events of a tail have no {BIRTH!r}: leave it out of the history")

    @property
    def read(self) -> list[str]:
        """The columns that are read from the store."""
        return list(dict.fromkeys([*self.history, *([self.store.time] if self.tail else [])]))

    @property
    def needed(self) -> list[str]:
        """The examples' columns that are needed for the histories."""
        logged = [self.generation] if self.generation is not None else []
        logged += [self.check.column] if self.check is not None else []
        return list(dict.fromkeys([self.time, *logged, *self.tail.values()]))

    def fit_to(self, schema: Schema) -> None:
        """Check that the examples' columns are of the right kind.

        Raises:
          ConfigError: One isn't.
        """
        if self.generation is not None:
            column = schema[self.generation]
            if column.is_list or column.dtype != "int64":
                raise ConfigError(f"late: generation must be an int64 column, got {column}")
        for of, name in self.tail.items():
            if not schema[name].is_list:
                raise ConfigError(f"late: the tail's {of!r} must be a list column, and {name!r} isn't one")
        if self.check is not None:
            need_numbers(schema, self.check.column, f"check={self.check.check!r} needs {self.check.column!r}")

    @tf.autograph.experimental.do_not_convert  # no Python branch on a tensor, so tracing is quicker
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with histories, and without the columns that only they needed."""
        if self.store.deletions:
            batch = self._without_deleted(batch)
        shown = batch["targets"]
        generations = (
            tf.fill(tf.shape(batch["task"]), tf.constant(self.store.generation, tf.int64))
            if self.generation is None
            else _last(shown[self.generation])
        )
        until = _last(shown[self.time])
        start = None if self.window is None else tf.maximum(until, tf.int64.min + self.window) - self.window
        found = self.store.read(
            batch["task"],
            self.read,
            until=until,
            start=start,
            generation=generations,
            longest=self.longest,
            on_bad=self.on_bad,
            stats=self.stats,
        )
        if self.tail:
            tail = {name: _last(shown[of]) for name, of in self.tail.items()}
            if start is not None:
                recent = tail[self.store.time] >= start[:, None]
                tail = {name: tf.ragged.boolean_mask(own, recent) for name, own in tail.items()}
            found = self._merge(found, tail)
        made = {
            **batch,
            "history": {name: found[name] for name in self.history},
            "targets": {name: shown[name] for name in self.targets},
        }
        if self.check is None:
            return made
        rows = shown[self.time].row_lengths()
        return self.check(made, generations, _last(shown[self.check.column]), rows)

    def _without_deleted(self, batch: dict[str, Any]) -> dict[str, Any]:
        shown = batch["targets"]
        written = None if self.generation is None else _last(shown[self.generation])
        deleted = self.store.deleted(batch["task"], written)
        rows = shown[self.time].row_lengths()
        return leave_out_deleted(batch, deleted, rows, self.stats, self.store.path)

    def _merge(
        self, found: Mapping[str, tf.RaggedTensor], tail: Mapping[str, tf.RaggedTensor]
    ) -> dict[str, tf.RaggedTensor]:
        """Merge the store's events and the tail's by time; at equal times, the store's come first."""
        both = {name: tf.concat([own, tf.cast(tail[name], own.dtype)], axis=1) for name, own in found.items()}
        times = both[self.store.time]
        by_time = tf.argsort(times.values, stable=True)
        order = tf.gather(by_time, tf.argsort(tf.gather(times.value_rowids(), by_time), stable=True))
        joined = {name: own.with_values(tf.gather(own.values, order)) for name, own in both.items()}
        if self.longest is None:
            return joined
        return {name: own[:, -self.longest :] for name, own in joined.items()}


def _last(rows: tf.RaggedTensor) -> tf.Tensor | tf.RaggedTensor:
    """Return the value, or the list, of each user's last row."""
    return tf.gather(rows.values, rows.row_splits[1:] - 1)
