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
    """A snapshot of a table's records, optimizer slots, step and admission at the time of its creation.

    Any number of snapshots of a table may exist at once; each is freed with its object. While a snapshot
    exists, the table keeps a copy, in float32, of each record that was used or removed since. If every row is
    used, these copies grow to the size of the whole table. What admission remembers of ids without a row is
    copied at once. A table on a GPU can't record changes: its snapshot is a full copy in host memory.

    Args:
      table: The table. Make and restore snapshots between two steps, in eager mode.

    Attributes:
      table: The table.
      optimizer: The kind of its optimizer.
      step: The table's step.
      admission: The state of admission.

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
        self.optimizer = table.optimizer.kind
        with tf.init_scope():
            self.step, self._state = int(table.step()), _state(table)
            self.admission: AdmissionState = table.export_admission()
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
            if self.optimizer != self.table.optimizer.kind:
                raise ConfigError(self._end_reason)
            if self._records is not None:
                self.table.import_(self._records, replace=True)
            else:
                self.table.imports += 1
                try:
                    _native.gmeta_hash_table_restore_snapshot(self.table.resource_handle, self._number)
                except tf.errors.InvalidArgumentError as error:
                    raise ConfigError(self._end_reason) from error
            self.table.import_admission(self.admission)

    def records(self) -> Records:
        """Return the records that the table had, for another table.

        If the table has changed since, it is restored for the time of the copy: call this between two steps.

        Raises:
          ConfigError: The table's optimizer has changed since.
        """
        if self._records is not None:
            return self._records
        with tf.init_scope():
            if self._state == _state(self.table):
                return self.table.export()
            now = TableSnapshot(self.table)
            try:
                self.restore()
                return self.table.export()
            finally:
                now.restore()

    @property
    def _end_reason(self) -> str:
        return (
            f"table {self.table.name!r} has another optimizer now than when the snapshot was taken, whose "
            "slots differ: take snapshots after compile"
        )


def _state(table: HashTable) -> tuple[int, ...]:
    """Return numbers of which at least one changes whenever the table's records do."""
    counts = table.statistics()
    used = (counts.hits, counts.misses, counts.updates, counts.removes, counts.evictions)
    return (table.imports, int(table.step()), int(counts.size), *map(int, used))


def _drop(handle: tf.Tensor, number: tf.Tensor) -> None:
    with tf.init_scope():  # garbage collection may run while a function is traced
        _native.gmeta_hash_table_drop_snapshot(handle, number)
