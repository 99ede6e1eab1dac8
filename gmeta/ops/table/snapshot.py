"""Snapshots of a table: what it held at a moment, to go back to.

In host memory a snapshot copies nothing. The table notes a record before it first changes, so that a snapshot
costs the rows that are used while it lives (``ops/table/host/undo_log.h``).
"""

from __future__ import annotations

import weakref

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.records import AdmissionState, Records

_native = load_op_library("ops")


class TableSnapshot:
    """A table's records, optimizer slots, step and admission as they are when this is made.

    Any number of snapshots of a table may live at once, and each is let go with its object. While one lives,
    the table keeps a copy, in float32, of each record that was used or removed since: memory grows up to that
    of the whole table if every row is used. What admission remembers of ids without a row is copied at once.
    A table on a GPU can't note changes: its snapshot is a copy of all of it in host memory.

    Args:
      table: The table. Make and restore snapshots between two steps, in eager mode.

    Example:
      >>> table = HashTable(1, name="item")
      >>> before = TableSnapshot(table)
      >>> _ = table.lookup([3, 4])  # makes two rows
      >>> before.restore()
      >>> int(table.size())
      0
    """

    def __init__(self, table: HashTable) -> None:
        self.table = table
        self._number: tf.Tensor | None = None
        self._records: Records | None = None
        self._kind = table.optimizer.kind
        with tf.init_scope():
            self._admission: AdmissionState = table.export_admission()
            if table.device == "gpu":
                with tf.device("CPU:0"):
                    self._records = Records(*(tf.identity(part) for part in table.export()))
                return
            handle = table.resource_handle
            self._number = _native.gmeta_hash_table_take_snapshot(handle)
        weakref.finalize(self, _drop, handle, self._number).atexit = False

    def restore(self) -> None:
        """Give the table what it held. The snapshot stays, and those that were made later do too.

        Raises:
          ConfigError: The table has another optimizer since.
        """
        with tf.init_scope():
            if self._kind != self.table.optimizer.kind:
                raise ConfigError(self._end_reason)
            if self._records is not None:
                self.table.import_(self._records, replace=True)
            else:
                try:
                    _native.gmeta_hash_table_restore_snapshot(self.table.resource_handle, self._number)
                except tf.errors.InvalidArgumentError as error:
                    raise ConfigError(self._end_reason) from error
            self.table.import_admission(self._admission)

    @property
    def _end_reason(self) -> str:
        return (
            f"table {self.table.name!r} has got another optimizer since the snapshot was taken, which has "
            "the slots of the one before: take snapshots after compile"
        )


def _drop(handle: tf.Tensor, number: tf.Tensor) -> None:
    with tf.init_scope():  # the collector may come while a function is traced
        _native.gmeta_hash_table_drop_snapshot(handle, number)
