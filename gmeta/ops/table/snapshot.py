"""Snapshots of a table, to restore its content at an earlier moment.

In host memory, taking a snapshot copies no rows. The table copies a record before it first changes, so that a
snapshot costs only the rows that are used while it exists (``ops/table/host/undo_log.h``).
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
    """Snapshot of a table's records, optimizer slots, step and admission at the time of its creation.

    Any number of snapshots of a table may exist at once; each is freed with its object. While a snapshot
    exists, the table keeps a copy, in float32, of each record that was used or removed since. If every row is
    used, these copies grow to the size of the whole table. What admission remembers of ids without a row is
    copied at once. A table on a GPU can't record changes: its snapshot is a full copy in host memory.

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
        """Restore the table's content. This snapshot and later ones stay valid.

        Raises:
          ConfigError: The table's optimizer has changed since.
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
    with tf.init_scope():  # garbage collection may run while a function is traced
        _native.gmeta_hash_table_drop_snapshot(handle, number)
