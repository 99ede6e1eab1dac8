"""Changes a table's optimizer in place."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.records import Records
from gmeta.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, RowWiseAdagrad, SparseOptimizer

_native = load_op_library("ops")

KINDS = {each.kind: each for each in (SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, RowWiseAdagrad)}
"""Name of an optimizer in checkpoints -> its class."""


def change_optimizer(table: HashTable, optimizer: SparseOptimizer) -> bool:
    """Change the optimizer that updates a table's rows, even in graphs that are already traced.

    Rows, frequencies, steps and admission state stay. Slots stay if both optimizers have the same slots;
    otherwise they restart as those of new rows. A table that has rows is copied once, and its snapshots can
    no longer be restored.

    Args:
      table: The table. Call this between two steps, in eager mode.
      optimizer: The new optimizer.

    Returns:
      Whether previously updated rows have lost their slots.
    """
    before, table._optimizer = table.optimizer, optimizer
    if dataclasses.replace(before, learning_rate=None) == dataclasses.replace(optimizer, learning_rate=None):
        return False
    keeps = _slots(before, table.dim) == _slots(optimizer, table.dim)
    with tf.init_scope():
        made = HashTable(
            table.dim,
            optimizer,
            table.initializer,
            table.seed,
            table.name,
            admission=table.admission,
            eviction=table.eviction,
            precision=table.precision,
            tiers=table.tiers,
            device=table.device,
        )
        records, admission = table.export(), table.export_admission()
        if admission.filter.shape != made.export_admission().filter.shape:  # sized by a bound in bytes
            admission = admission._replace(filter=tf.zeros([0], tf.uint8))
        made.import_(records if keeps else with_fresh_slots(records, optimizer, table.dim), replace=True)
        made.import_admission(admission)
        with tf.device(table._resource_device):
            _native.gmeta_hash_table_swap(table.resource_handle, made.resource_handle)
    return not keeps and bool(before.slots) and int(tf.size(records.keys)) > 0 and int(records.step) > 0


def with_fresh_slots(records: Records, optimizer: SparseOptimizer, dim: int) -> Records:
    """Return the records with the slots of new rows."""
    rows, floats = tf.shape(records.keys)[0], optimizer.slot_floats(dim)
    first = min(dim, floats)
    started = tf.fill([rows, first], tf.constant(optimizer.initial_slot, tf.float32))
    return records._replace(slots=tf.concat([started, tf.zeros([rows, floats - first])], axis=1))


def take_records_of(table: HashTable, kind: str) -> Callable[[Records], Records]:
    """Prepare a table that follows a Keras optimizer to load a checkpoint of another kind of optimizer.

    If no `compile` has chosen an optimizer for the table yet, the table takes the checkpoint's kind and
    continues with its slots. Otherwise rows are loaded without their slots, and a warning says so.

    Args:
      table: The table.
      kind: The name of the optimizer in the checkpoint.

    Returns:
      A function to apply to the records before they are imported.

    Raises:
      ConfigError: gmeta has no such optimizer.
    """
    if kind not in KINDS:
        raise ConfigError(f"table {table.name!r}: the checkpoint is of an optimizer {kind!r}, unknown here")
    saved = KINDS[kind](learning_rate=None)
    if table.chosen_by == "nobody":
        change_optimizer(table, saved)
    if _slots(saved, table.dim) == _slots(table.optimizer, table.dim):
        return lambda records: records
    warnings.warn(
        f"table {table.name!r} follows a Keras optimizer with {type(table.optimizer).__name__}, but was "
        f"saved with {type(saved).__name__}: its rows are loaded, and its optimizer's slots begin anew",
        stacklevel=2,
    )
    return lambda records: with_fresh_slots(records, table.optimizer, table.dim)


def _slots(optimizer: SparseOptimizer, dim: int) -> tuple[tuple[str, ...], int]:
    return tuple(optimizer.slots), optimizer.slot_floats(dim)
