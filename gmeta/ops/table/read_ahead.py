"""Rows that are read ahead: while one batch computes, the rows of the next are fetched.

An inserting lookup reads rows and has effects: it evicts, admits, inserts, and counts uses. A peek reads
without effects, at any time. A reread, in the batch's turn, has the effects of the lookup, and reads again
only what has changed since. So results equal those of a run without peeks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.ops.device import float_matrix, is_portable, keys_vector

_native = load_op_library("ops")
for _name in ("Peek", "Prefetch", "Reread"):
    tf.no_gradient(f"GmetaHashTable{_name}")


class Peeked(NamedTuple):
    """Rows that were read ahead.

    Attributes:
      rows: (n, dim) float32, the row of each key at some moment during the peek.
      stamps: (n,) int64, from which `HashTable.reread` determines the changed rows. A stamp of 0 stands for a
        row that wasn't peeked. ``ops/table/core/stamp.h`` explains the others.
    """

    rows: tf.Tensor
    stamps: tf.Tensor


class Reread(NamedTuple):
    """Result of a lookup of peeked keys.

    Attributes:
      rows: (n, dim) float32, the row of each key, as `HashTable.lookup_keys` returns it.
      changed: () int64, how many rows were read again because they may have changed since the peek.
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

        In a ``tf.function``, a peek waits for none of the table's other ops that are called there, and none
        waits for it. It may therefore read rows before or after an update of the same step; `reread` accounts
        for both. To make it wait, use ``tf.control_dependencies``. This holds within one function: a nested
        ``tf.function`` that peeks is, as a whole, ordered by its calls.

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
        """Bring the rows of a later batch to the fast tier (`gmeta.policies.Tiers`); results don't change.

        From a drive to host memory: the call returns when the rows have arrived. Call it where batches are
        made, such as in `tf.data.Dataset.map`, or in a thread. A lookup or a `peek` would bring them too, but
        its step would wait for them.

        From host memory to a GPU's: the call returns at once, and copies run beside compute. Call it one or
        two batches before the batch's step, and once for all keys of a batch: ``Tiers.lookahead`` counts
        calls. Only prefetches move rows to the GPU. Rows for which it has no room stay in host memory.

        Without tiers, nothing happens. In a ``tf.function``, a prefetch waits for none of the table's other
        ops that are called there, and none waits for it, as with `peek`.

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
        """Look up keys whose rows were peeked, and read again only the rows that may have changed since.

        The effects on the table and its statistics are those of `HashTable.lookup_keys`, and so are the rows,
        bit for bit: whatever happened since the peek, in this thread or another, even if the optimizer was
        replaced or a checkpoint restored.

        Args:
          keys: (n,) integers, the keys of the peek in the same order.
          peeked: What `peek` returned for these keys, from this table. Rows with a stamp of 0 are read again
            in any case, so zeros stand for "nothing was peeked".
          insert: As in `HashTable.lookup`.
          distinct: As in `HashTable.lookup_keys`.

        Returns:
          `Reread`. Its rows may be in the memory of ``peeked.rows``, if nothing else uses that.

        Raises:
          ConfigError: Wrong dtypes or shapes, or the graph is to be exported (`portable_ops`).
          tf.errors.InvalidArgumentError: There is another number of stamps than of keys.
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
    """Take an op out of the order in which TensorFlow runs the ops of a function on one resource.

    It is given by itself or by one of its outputs; None stands for an op in eager mode. The order is that of
    the program: an op would wait for the one before. The op still runs in every call of the function, and
    isn't computed in advance or merged with others, because it is stateful.
    """
    if made is None or tf.executing_eagerly():
        return
    order = made.graph.experimental_acd_manager  # of automatic control dependencies; None: none are made
    if order is not None:
        order.run_independently(made if isinstance(made, tf.Operation) else made.op)
