"""Records the lookups that a training step makes, so that their rows can be trained.

A lookup belongs to the call (see `gmeta.layers.embedding.collection`), and a model may call an
`EmbeddingCollection` anywhere and any number of times. So the code that runs the step opens a recording. It
notes every lookup made inside it and lets the step's tape watch the rows. Once the gradients are computed,
those of all calls are put together and each physical table makes one update, in which gradients to the same
key are summed. No state is left in the layer. On several ranks, one exchange sends the gradients of all
lookups to the rows' owners.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.step import within_step
from gmeta.layers.exchange.pieces import SentKeys, exchange_gradients
from gmeta.ops.table.finite import NamedGradient, refuse_bad
from gmeta.ops.table.hash_table import HashTable

# Counts the samples in all ranks' batches of a step, through the step's first key exchange.
#
# Ranks take steps together. A rank whose data has ended takes steps without samples until all ranks' data has
# ended. Detecting that moment needs no extra collective: each rank sends its number of samples with its keys.


class StepSamples:
    """The numbers of samples in a step.

    Attributes:
      own: () int64, this rank's number.
      everywhere: () int64, the sum over all ranks; None until a key exchange has delivered it.
      before_end: Tensors that a step which ends the data must wait for.
    """

    def __init__(self, own: tf.Tensor) -> None:
        with tf.device("CPU:0"):
            self.own = tf.cast(own, tf.int64)
        self.everywhere: tf.Tensor | None = None
        self.before_end: list[tf.Tensor] = []
        self._graph = current_graph()

    def hear(self, notes: tf.Tensor) -> None:
        """Read the ranks' numbers from an exchange's notes, (world size, 1) int64."""
        # A tensor made in a function within the step can't be used outside of that function.
        if self.everywhere is None and current_graph() is self._graph:
            with tf.device("CPU:0"):
                self.everywhere = tf.reduce_sum(notes[:, 0])


@contextmanager
def step_samples(own: tf.Tensor) -> Iterator[StepSamples]:
    """Let the lookups in the ``with`` block send this rank's number of samples to the other ranks."""
    samples = StepSamples(own)
    with within_step(samples=samples):
        yield samples


def current_graph() -> Any:
    """Return the graph that is being traced; None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class TableGradient(NamedTuple):
    """The gradient for one update of one physical table.

    Attributes:
      table: The table.
      keys: (n,) int64. A key may occur several times; the update sums its values.
      values: (n, dim) float32.
      distinct: (u,) int64, the distinct keys among which ``keys`` are, if they are known.
      positions: (n,), for each of ``keys`` its index in ``distinct``. None: ``keys`` are distinct themselves.
    """

    table: HashTable
    keys: tf.Tensor
    values: tf.Tensor
    distinct: tf.Tensor | None = None
    positions: tf.Tensor | None = None

    def times(self, factor: tf.Tensor) -> TableGradient:
        """Return this gradient with its values multiplied by ``factor``."""
        return self._replace(values=self.values * factor)

    def apply(self, learning_rate: Any) -> None:
        """Update the table once, at ``learning_rate`` unless the table's optimizer has its own rate.

        The caller has checked that the gradient is finite, or allows that it isn't.
        """
        own = self.table.optimizer.learning_rate is not None
        rate = None if own else learning_rate
        keys, values = self.keys, self.values
        if self.distinct is not None:
            keys = self.distinct
            values = values if self.positions is None else tf.IndexedSlices(values, self.positions)
        known = self.distinct is not None
        self.table.apply_gradients(keys, values, learning_rate=rate, finite=False, distinct=known)


class LookedUp(Protocol):
    """The interface of a `CollectionLookup`: each table's rows and keys, and their exchange."""

    @property
    def rows(self) -> tuple[tf.Tensor, ...]:
        """For each table (u, dim) float32."""

    @property
    def keys(self) -> tuple[tf.Tensor, ...]:
        """For each table (u,) int64."""

    @property
    def sent(self) -> SentKeys | None:
        """The exchange that brought the rows; None if this rank has all rows itself."""

    @property
    def distinct(self) -> bool:
        """Whether a table's keys are distinct."""


Part = tuple[tf.Tensor, ...]
"""The fields of a `TableGradient` after its table; those of distinct keys may be missing."""


class RowGradients(Protocol):
    """The interface of a step's lookups: of `RecordedLookups`, and of a frozen window."""

    def by_table(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[TableGradient]:
        """Group gradients by physical table, at the rows' owners."""

    def named(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[NamedGradient]:
        """Return this rank's gradients with the keys that they belong to."""


class _Recorded(NamedTuple):
    tables: tuple[HashTable, ...]
    lookup: LookedUp
    wire_dtype: tf.DType


class RecordedLookups:
    """The lookups of a step, in the order in which they were made.

    Attributes:
      rows: One (unique, dim) float32 tensor for each lookup of each physical table. Differentiate the loss
        with respect to these tensors, as with respect to variables.
    """

    def __init__(self, *tapes: tf.GradientTape) -> None:
        self.rows: list[tf.Tensor] = []
        self._tapes = tapes
        self._lookups: list[_Recorded] = []
        self._graph = current_graph()

    @property
    def tables(self) -> list[HashTable]:
        """The tables that were looked up, each once."""
        return list({id(table): table for each in self._lookups for table in each.tables}.values())

    def add(self, tables: Sequence[HashTable], lookup: LookedUp, wire_dtype: tf.DType = tf.float32) -> None:
        """Record one lookup and watch its rows.

        Args:
          tables: The tables.
          lookup: The lookup in these tables.
          wire_dtype: The dtype in which the gradients travel between ranks.

        Raises:
          ConfigError: The lookup was made inside a ``tf.function``, ``tf.cond`` or ``tf.while_loop`` within
            the recording, from which no gradient can be taken.
        """
        if current_graph() is not self._graph:
            raise ConfigError(
                f"table {tables[0].name!r} was looked up inside a tf.function, tf.cond or tf.while_loop "
                "within the step, which therefore can't differentiate by its rows: remove @tf.function "
                "from the model's call (fit compiles the whole step), or look up outside and gather inside"
            )
        for tape in self._tapes:
            tape.watch(lookup.rows)
        self.rows.extend(lookup.rows)
        self._lookups.append(_Recorded(tuple(tables), lookup, wire_dtype))

    def by_table(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[TableGradient]:
        """Group the gradients of ``rows`` by physical table and send them to the rows' owners.

        A table whose rows have no gradient at all is left out, with a warning, as Keras does for variables.
        On several ranks this is an exchange: it returns the gradients from all ranks for the rows that this
        rank owns, and the table's update adds them up. All ranks must call it, with gradients for the same
        rows.
        """
        split = self._split(gradients)
        return by_table(
            pair
            for each, found in zip(self._lookups, _at_owners(self._lookups, split), strict=True)
            for pair in zip(each.tables, found, strict=True)
        )

    def named(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[NamedGradient]:
        """Return this rank's gradients of ``rows``, except those that are None, with their keys."""
        return [
            NamedGradient(table, *_values_and_keys(keys, gradient))
            for each, own in zip(self._lookups, self._split(gradients), strict=True)
            for table, keys, gradient in zip(each.tables, each.lookup.keys, own, strict=True)
            if gradient is not None
        ]

    def _split(
        self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]
    ) -> list[list[tf.Tensor | tf.IndexedSlices | None]]:
        """Divide the gradients of ``rows`` among the lookups."""
        if len(gradients) != len(self.rows):
            raise ConfigError(
                f"{len(self.rows)} rows were looked up, but there are {len(gradients)} gradients"
            )
        rest = iter(gradients)
        return [[next(rest) for _ in each.tables] for each in self._lookups]

    def apply_gradients(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        learning_rate: float | tf.Tensor | None = None,
        *,
        finite: bool = True,
    ) -> None:
        """Update each physical table once.

        Args:
          gradients: The gradients of ``rows``, in their order, as `tf.GradientTape.gradient` returns them.
            Several ranks' gradients are added up: pass each rank's share of the gradient of the global loss.
          learning_rate: The rate for tables whose optimizer has none of its own, such as a Keras optimizer's
            current rate.
          finite: Whether to refuse this rank's gradients that hold NaN or infinity, before any table changes.

        Raises:
          NotFiniteError: A gradient holds NaN or infinity; a graph raises `tf.errors.InvalidArgumentError`.
            The message names the table and the id.
        """
        if finite:
            gradients = refuse_bad(self.named(gradients), list(gradients))
        for gradient in self.by_table(gradients):
            gradient.apply(learning_rate)


@contextmanager
def record_lookups(*tapes: tf.GradientTape) -> Iterator[RecordedLookups]:
    """Record the lookups of all embedding collections that are called with ``training=True``.

    `gmeta.models.Model` does this in its train step. In a custom training loop,
    `gmeta.models.JointOptimizer` makes the step of dense variables and rows. With a table optimizer that has
    a rate of its own, the rows can also be updated without it:

    Example:
      >>> collection = EmbeddingCollection([FeatureConfig("user", dim=4)], optimizer=SGD(0.1))
      >>> head = tf.keras.layers.Dense(1)
      >>> users = {"user": tf.constant([7, 8, 7])}
      >>> with tf.GradientTape() as tape, record_lookups(tape) as lookups:
      ...     loss = tf.reduce_mean((head(collection(users, training=True)["user"]) - 1.0) ** 2)
      >>> dense, rows = tape.gradient(loss, (head.trainable_variables, lookups.rows))
      >>> lookups.apply_gradients(rows)
      >>> int(collection.tables[0].statistics().updates)
      2

    Args:
      *tapes: The tapes that should watch the rows.

    Yields:
      The `RecordedLookups`. If recordings are nested, only the innermost records a lookup.

    Raises:
      ConfigError: A launcher started this process as one of several ranks, and `gmeta.init` wasn't called.
    """
    collectives.check_init()
    lookups = RecordedLookups(*tapes)
    with within_step(recording=lookups):
        yield lookups


def by_table(found: Iterable[tuple[HashTable, Part | None]]) -> list[TableGradient]:
    """Put the keys and gradients of several lookups together, table by table.

    A table without any gradient is left out, with a warning.
    """
    parts: dict[int, list[Part]] = {}
    tables: dict[int, HashTable] = {}
    for table, part in found:
        tables[id(table)] = table
        parts.setdefault(id(table), []).extend([] if part is None else [part])
    together = []
    for identity, of_table in parts.items():
        table = tables[identity]
        if not of_table:
            warnings.warn(
                f"no gradient for table {table.name!r}: the loss doesn't depend on it", stacklevel=2
            )
            continue
        if len(of_table) == 1:
            together.append(TableGradient(table, *of_table[0]))
            continue
        keys, values = zip(*(part[:2] for part in of_table), strict=True)
        together.append(TableGradient(table, tf.concat(keys, axis=0), tf.concat(values, axis=0)))
    return together


def _at_owners(
    lookups: Sequence[_Recorded], gradients: Sequence[Sequence[tf.Tensor | tf.IndexedSlices | None]]
) -> list[list[Part | None]]:
    """Return, for each lookup and table, the keys and gradients that this rank must apply."""
    found: list[list[Part | None]] = [
        [
            _local(keys, gradient, each.lookup.distinct)
            for keys, gradient in zip(each.lookup.keys, own, strict=True)
        ]
        for each, own in zip(lookups, gradients, strict=True)
    ]
    wires = {each.wire_dtype: None for each in lookups if each.lookup.sent is not None}
    for wire_dtype in wires:  # one exchange, unless collections differ in wire_dtype
        chosen = [
            index
            for index, each in enumerate(lookups)
            if each.lookup.sent is not None and each.wire_dtype == wire_dtype
        ]
        sent = [keys for keys in (lookups[i].lookup.sent for i in chosen) if keys is not None]
        owned = exchange_gradients(sent, [gradients[i] for i in chosen], wire_dtype=wire_dtype)
        for index, parts in zip(chosen, owned, strict=True):
            found[index] = list(parts)
    return found


def _values_and_keys(
    keys: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices
) -> tuple[tf.Tensor, Callable[[], tf.Tensor]]:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, lambda: tf.gather(keys, gradient.indices)
    return gradient, lambda: keys


def _local(keys: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices | None, distinct: bool) -> Part | None:
    if isinstance(gradient, tf.IndexedSlices):
        part: Part = (tf.gather(keys, gradient.indices), gradient.values)
        return (*part, keys, gradient.indices) if distinct else part
    return None if gradient is None else (keys, gradient, keys)[: 3 if distinct else 2]
