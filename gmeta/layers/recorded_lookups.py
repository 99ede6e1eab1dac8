"""The lookups that a training step makes, so that their rows can be trained.

A lookup belongs to the call (see `gmeta.layers.embedding_collection`), and an `EmbeddingCollection` is called
somewhere inside a model, any number of times. So whoever runs the step says "record": every lookup that is
made until then is noted and watched by the step's tape. When the gradients are there, those of all calls are
put together and each physical table makes one update, in which gradients to the same key are summed. No state
is left in the layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.ops.hash_table import HashTable

_active: ContextVar[RecordedLookups | None] = ContextVar("recorded_lookups", default=None)


class TableGradient(NamedTuple):
    """What one update of one physical table takes.

    Attributes:
      table: The table.
      keys: (n,) int64. A key may stand there several times: the update sums.
      values: (n, dim) float32.
    """

    table: HashTable
    keys: tf.Tensor
    values: tf.Tensor

    def apply(self, learning_rate: Any) -> None:
        """One update, at ``learning_rate`` unless the table's optimizer has a rate of its own."""
        own = self.table.optimizer.learning_rate is not None
        self.table.apply_gradients(self.keys, self.values, learning_rate=None if own else learning_rate)


class RecordedLookups:
    """The lookups of a step, in the order in which they were made.

    Attributes:
      rows: One (unique, dim) float32 tensor for each lookup of each physical table. Differentiate the loss
        with respect to these, as to variables.
    """

    def __init__(self, *tapes: tf.GradientTape) -> None:
        self.rows: list[tf.Tensor] = []
        self._tapes = tapes
        self._keys: list[tf.Tensor] = []
        self._tables: list[HashTable] = []
        self._graph = _current_graph()

    def add(self, table: HashTable, keys: tf.Tensor, rows: tf.Tensor) -> None:
        """Note one lookup and watch its rows.

        Raises:
          ConfigError: It was made inside a ``tf.function``, ``tf.cond`` or ``tf.while_loop`` of its own, out
            of which no gradient can be taken.
        """
        if _current_graph() is not self._graph:
            raise ConfigError(
                f"table {table.name!r} was looked up inside a tf.function, tf.cond or tf.while_loop "
                "within the step, which so can't differentiate by its rows: take @tf.function off the "
                "model's call (fit compiles the whole step), or look up outside and gather inside"
            )
        for tape in self._tapes:
            tape.watch(rows)
        self.rows.append(rows)
        self._keys.append(keys)
        self._tables.append(table)

    def by_table(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[TableGradient]:
        """The gradients of ``rows``, those of one physical table put together.

        A table whose rows have no gradient at all is left out, with a warning, as Keras does for variables.
        """
        parts: dict[int, list[tuple[tf.Tensor, tf.Tensor]]] = {id(table): [] for table in self._tables}
        tables = {id(table): table for table in self._tables}
        for table, keys, gradient in zip(self._tables, self._keys, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                parts[id(table)].append((tf.gather(keys, gradient.indices), gradient.values))
            elif gradient is not None:
                parts[id(table)].append((keys, gradient))
        together = []
        for identity, found in parts.items():
            table = tables[identity]
            if not found:
                warnings.warn(
                    f"no gradient for table {table.name!r}: the loss doesn't depend on it", stacklevel=2
                )
                continue
            keys, values = zip(*found, strict=True)
            together.append(TableGradient(table, _joined(keys), _joined(values)))
        return together

    def apply_gradients(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        learning_rate: float | tf.Tensor | None = None,
    ) -> None:
        """One update of each physical table.

        Args:
          gradients: The gradients of ``rows``, in their order, as `tf.GradientTape.gradient` gives them.
          learning_rate: For tables whose optimizer has none of its own, such as a Keras optimizer's current
            rate.
        """
        for gradient in self.by_table(gradients):
            gradient.apply(learning_rate)


@contextmanager
def record_lookups(*tapes: tf.GradientTape) -> Iterator[RecordedLookups]:
    """Record what the embedding collections that are called with ``training=True`` look up.

    `gmeta.models.Model` does this in its train step; a training loop of your own does it so:

    Example:
      >>> collection = EmbeddingCollection([FeatureConfig("user", 4)], optimizer=SGD(0.1))
      >>> head = tf.keras.layers.Dense(1)
      >>> users = {"user": tf.constant([7, 8, 7])}
      >>> with tf.GradientTape() as tape, record_lookups(tape) as lookups:
      ...     loss = tf.reduce_mean((head(collection(users, training=True)["user"]) - 1.0) ** 2)
      >>> dense, rows = tape.gradient(loss, (head.trainable_variables, lookups.rows))
      >>> lookups.apply_gradients(rows)
      >>> int(collection.tables[0].statistics().updates)
      2

    Args:
      *tapes: The tapes that are to watch the rows.

    Yields:
      The `RecordedLookups`. Inside another recording, it is the inner one that sees the lookups.
    """
    lookups = RecordedLookups(*tapes)
    token = _active.set(lookups)
    try:
        yield lookups
    finally:
        _active.reset(token)


def active_recording() -> RecordedLookups | None:
    """What the innermost `record_lookups` yielded, or None outside of any."""
    return _active.get()


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
