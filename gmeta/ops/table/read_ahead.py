"""Rows that are read ahead: while one batch computes, the rows of the next one are fetched.

An inserting lookup reads rows and has side effects: it evicts, admits, inserts, and counts uses. A peek reads
without side effects, at any time. A reread, when the batch is trained, has the side effects of the lookup,
and rereads only rows that have changed since. Results therefore equal those of a run without peeks.

`HasClock`, below, is the part of a table that evicts by a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.ops.device import float_matrix, is_portable, keys_vector
from gmeta.policies import TTL
from gmeta.policies.row_lifetimes import Eviction

_native = load_op_library("ops")
for _name in ("Peek", "Prefetch", "Reread"):
    tf.no_gradient(f"GmetaHashTable{_name}")
tf.no_gradient("GmetaNoteStepTime")


class Peeked(NamedTuple):
    """Rows that were read ahead.

    Attributes:
      rows: (n, dim) float32, the row of each key at some time during the peek.
      stamps: (n,) int64, from which `HashTable.reread` determines the changed rows. A stamp of 0 means that
        the row wasn't peeked. ``ops/table/core/stamp.h`` explains the others.
    """

    rows: tf.Tensor
    stamps: tf.Tensor


class Reread(NamedTuple):
    """Result of a lookup of peeked keys.

    Attributes:
      rows: (n, dim) float32, the row of each key, as `HashTable.lookup_keys` returns it.
      changed: () int64, the number of rows that were reread because they may have changed since the peek.
    """

    rows: tf.Tensor
    changed: tf.Tensor


class ReadsAhead:
    """The part of a `HashTable` that reads rows ahead."""

    resource_handle: Any
    _dim: int

    @property
    def _owner(self) -> str:
        raise NotImplementedError

    def peek(self, keys: Any) -> Peeked:
        """Read rows ahead, for a later `reread` of the same keys. The table doesn't change.

        Nothing is inserted or counted, not even in `statistics`; a missing key reads its initial row.

        In a ``tf.function``, a peek doesn't wait for the table's other ops, and they don't wait for it. It
        may therefore read rows before or after an update of the same step; `reread` handles both. To make it
        wait, use ``tf.control_dependencies``. This applies within one function: calls of a nested
        ``tf.function`` that peeks are ordered as a whole.

        Args:
          keys: (n,) integers. A key may occur any number of times.

        Returns:
          `Peeked`.

        Raises:
          ConfigError: ``keys`` is not a vector of integers, or the graph is to be exported (`portable_ops`).

        Example:
          >>> table = HashTable(2, optimizer=SGD(1.0), initializer=Zeros(), name="item")
          >>> _ = table.lookup([3])
          >>> peeked = table.peek([3, 5])
          >>> table.apply_gradients([3], tf.ones([1, 2]))  # changes one of the two rows
          >>> rows, changed = table.reread([3, 5], peeked)
          >>> rows.numpy()
          array([[-1., -1.],
                 [ 0.,  0.]], dtype=float32)
          >>> int(changed)
          1
        """
        self._refuse_export()
        peeked = Peeked(
            *_native.gmeta_hash_table_peek(
                self.resource_handle, keys_vector(keys, self._owner), dim=self._dim
            )
        )
        _free_of_order(peeked.rows)
        return peeked

    def prefetch(self, keys: Any) -> tf.Operation | None:
        """Move the rows of a later batch to the fast tier (`gmeta.policies.Tiers`); results don't change.

        From a drive to host memory: the call returns when the rows have arrived. Call it where batches are
        made, such as in `tf.data.Dataset.map`, or in a thread. A lookup or a `peek` would move them too, but
        its step would wait for them.

        From host memory to a GPU's: the call returns immediately, and copies overlap with compute. Call it
        one or two batches before the batch's step, and once for all keys of a batch: ``Tiers.lookahead``
        counts calls. Only prefetches move rows to the GPU. Rows that don't fit stay in host memory.

        Without tiers, nothing happens. In a ``tf.function``, a prefetch doesn't wait for the table's other
        ops, and they don't wait for it, as with `peek`.

        Args:
          keys: (n,) integers. Keys without a row are skipped.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          ConfigError: ``keys`` is not a vector of integers, or the graph is to be exported (`portable_ops`).

        Example:
          >>> table = HashTable(2, name="item")  # or device="gpu", tiers=Tiers(hbm_rows=1_000_000)
          >>> batches = [[1, 2], [2, 3], [1, 5]]
          >>> for batch, later in zip(batches, [*batches[1:], []]):
          ...     table.prefetch(tf.constant(later, tf.int64))
          ...     lookup = table.lookup(batch)
        """
        self._refuse_export()
        made = _native.gmeta_hash_table_prefetch(self.resource_handle, keys_vector(keys, self._owner))
        _free_of_order(made)
        return made

    def reread(
        self, keys: Any, peeked: Peeked, insert: bool | tf.Tensor = True, *, distinct: bool = False
    ) -> Reread:
        """Look up keys whose rows were peeked, and reread only the rows that may have changed since.

        The side effects on the table and its statistics equal those of `HashTable.lookup_keys`, and so do the
        rows, bit for bit: regardless of what happened since the peek, in this thread or another, even if the
        optimizer was replaced or a checkpoint restored.

        Args:
          keys: (n,) integers, the keys of the peek in the same order.
          peeked: The result of `peek` for these keys, from this table. Rows with a stamp of 0 are always
            reread, so zeros mean "nothing was peeked".
          insert: As in `HashTable.lookup`.
          distinct: As in `HashTable.lookup_keys`.

        Returns:
          `Reread`. Its rows may reuse the memory of ``peeked.rows``, if nothing else uses it.

        Raises:
          ConfigError: Wrong dtypes or shapes, or the graph is to be exported (`portable_ops`).
          tf.errors.InvalidArgumentError: The number of stamps differs from that of keys.
        """
        self._refuse_export()
        keys = keys_vector(keys, self._owner)
        return Reread(
            *_native.gmeta_hash_table_reread(
                table=self.resource_handle,
                keys=keys,
                peeked=float_matrix(peeked.rows, self._owner, "peeked rows", keys, self._dim),
                stamps=tf.convert_to_tensor(peeked.stamps, tf.int64),
                insert=tf.convert_to_tensor(insert, tf.bool),
                distinct=distinct,
            )
        )

    def _refuse_export(self) -> None:
        if is_portable():
            raise ConfigError(
                f"{self._owner}: an exported graph can't read rows ahead; call lookup with insert=False there"
            )


def _free_of_order(made: tf.Tensor | tf.Operation | None) -> None:
    """Exempt an op from the order in which TensorFlow runs the ops of a function on one resource.

    Pass the op or one of its outputs; None in eager mode. The order is that of the program: an op would wait
    for the previous one. The op still runs in every call of the function, and isn't evaluated in advance or
    merged with others, because it is stateful.
    """
    if made is None or tf.executing_eagerly():
        return
    order = made.graph.experimental_acd_manager  # of automatic control dependencies; None: none are made
    if order is not None:
        order.run_independently(made if isinstance(made, tf.Operation) else made.op)


# The clock of a table whose rows have a lifetime in seconds.

_MICROSECONDS = 1e6


class _StepTimes:
    """Steps and their times, (n, 2) int64. TensorFlow tracks no variable in it, so tables save it."""

    def __init__(self, lifetime: float, every: float) -> None:
        self.lifetime, self.every = (max(1, round(time * _MICROSECONDS)) for time in (lifetime, every))
        with tf.init_scope(), tf.device("CPU:0"):
            shape = tf.TensorShape([None, 2])
            self.pairs = tf.Variable(np.empty((0, 2), np.int64), trainable=False, shape=shape)

    def note(self, step: tf.Tensor, seconds: tf.Tensor) -> Any:
        return _native.gmeta_note_step_time(
            self.pairs.read_value(),
            step,
            tf.cast(seconds, tf.float64),
            lifetime=self.lifetime,
            every=self.every,
        )


class HasClock:
    """The part of a `gmeta.ops.HashTable` that evicts by a clock (`gmeta.policies.TTL` with ``seconds``).

    A record has the step of its last use, not the time. The table therefore notes at which times it came to
    its steps, in at most 67 pairs (``ops/table/core/step_times.h``). They are saved with the table.

    Attributes:
      clock: Function without arguments that returns the time in seconds, () float64. The default is the
        machine's time. Functions that are already traced keep the clock that they were traced with.
    """

    clock: Callable[[], tf.Tensor] = staticmethod(tf.timestamp)
    _times: _StepTimes | None = None

    def _start_clock(self, eviction: Eviction | None) -> None:
        if isinstance(eviction, TTL) and eviction.seconds is not None:
            self._times = _StepTimes(eviction.lifetime, eviction.interval)

    @property
    def step_times(self) -> tf.Tensor | None:
        """The noted steps and their times in microseconds, (n, 2) int64; None in a table without a clock."""
        return None if self._times is None else self._times.pairs.read_value()

    def set_step_times(self, pairs: npt.ArrayLike | tf.Tensor) -> None:
        """Replace `step_times` by saved ones; does nothing in a table without a clock.

        Without pairs, all rows count as used at the next update.
        """
        if self._times is not None:
            self._times.pairs.assign(np.reshape(np.asarray(pairs, np.int64), (-1, 2)))

    def _sweep(self: Any, updated: tf.Operation | None) -> tf.Operation | None:
        """Note the time of an update, and sweep the shards whose turn has come."""
        if self._times is None:
            return updated
        with tf.control_dependencies([] if updated is None else [updated]):
            noted, before, turns = self._note()
            kept = self._times.pairs.assign(noted, read_value=False)
            evicted = _native.gmeta_hash_table_evict(self.resource_handle, before, turns)
        return None if tf.executing_eagerly() else tf.group(kept, evicted)

    def _note(self: Any) -> Any:
        with tf.device("CPU:0"):
            return self._times.note(self.step(), self.clock())

    def _evict_all(self: Any) -> tf.Tensor:
        """Evict in all shards, as of now."""
        before = tf.constant(-1, tf.int64) if self._times is None else self._note()[1]
        return _native.gmeta_hash_table_evict(self.resource_handle, before, tf.constant(-1, tf.int64))
