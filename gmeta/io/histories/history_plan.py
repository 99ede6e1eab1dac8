"""How an example's history is put together: what the store has, and the tail that the example carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.data.history_manifest import BIRTH
from gmeta.core.data.on_bad import OnBad
from gmeta.core.data.schema import Schema
from gmeta.core.errors import ConfigError
from gmeta.io.histories.deleted_examples import leave_out_deleted
from gmeta.io.histories.logged_check import LoggedCheck, need_numbers
from gmeta.io.histories.store import HistoryStore
from gmeta.io.reader_stats import ReaderStats


@dataclass(frozen=True)
class HistoryPlan:
    """A function that adds histories to a batch of exposures; `gmeta.io.late` describes its attributes.

    Raises:
      ConfigError: A column isn't in the store, or the tail hasn't all columns.
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
        """Join the store's events and the tail's by time; of equal times the store's come first."""
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
