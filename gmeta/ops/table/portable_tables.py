"""Tracing without gmeta's own ops, so that a saved graph runs wherever TensorFlow does.

Inside `portable_ops`, each op that a prediction needs uses its form in plain TensorFlow, and each table is
read from a `FrozenTable`, a copy of its current state. This applies to everything that is called inside,
layers and models included. A model is therefore exported by tracing it once more, and needs no export code of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from gmeta.initializers.portable_rows import portable_initial_rows, portable_round_to_float16
from gmeta.ops.portable import ACTIVE
from gmeta.ops.table.finite import refuse_bad_rows
from gmeta.ops.table.frozen_table import FrozenTable, UnknownRows
from gmeta.ops.table.hash_table import HashTable


class PortableTables:
    """Tables that a portable graph reads, each frozen when it is first read.

    Args:
      unknown: Table -> the rows of keys that it doesn't hold.
    """

    def __init__(self, unknown: Callable[[HashTable], UnknownRows]) -> None:
        self._unknown = unknown
        self._frozen: dict[int, tuple[HashTable, FrozenTable]] = {}

    def freeze(self, table: HashTable) -> FrozenTable:
        """Return the table's frozen copy.

        Raises:
          NotFiniteError: A row holds NaN or infinity; the message names its table and id.
        """
        if id(table) not in self._frozen:
            with tf.init_scope():  # variables, not parts of the graph that is being traced
                records = table.export(with_slots=False)  # the rows' tensor becomes the variable's own
                refuse_bad_rows(table, records.keys, records.rows)
                copy = FrozenTable(records.keys, records.rows, self._unknown(table))
            self._frozen[id(table)] = table, copy
        return self._frozen[id(table)][1]

    def __iter__(self) -> Iterator[FrozenTable]:
        return (copy for _, copy in self._frozen.values())


def initial_rows_of(table: HashTable) -> UnknownRows:
    """Make the function that computes initial rows as the table does for keys that it doesn't hold."""

    def rows(keys: tf.Tensor) -> tf.Tensor:
        initial = portable_initial_rows(table.initializer, table.seed, keys, table.dim)
        return initial if table.precision is None else portable_round_to_float16(initial)

    return rows


@contextmanager
def portable_ops(
    unknown: Callable[[HashTable], UnknownRows] = initial_rows_of,
) -> Iterator[PortableTables]:
    """Make gmeta's ops use their form in plain TensorFlow, in this thread and inside this block.

    Lookups that would insert are refused. Ops without such a form, such as updates, don't change.

    Args:
      unknown: Table -> the rows of keys that it doesn't hold.

    Yields:
      The tables that were read; an exported object must keep them.

    Example:
      >>> table = HashTable(1, initializer=Constant(2.0))
      >>> with portable_ops() as tables:
      ...     rows = tf.function(lambda ids: table.lookup(ids, insert=False).rows)
      ...     graph = rows.get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
      >>> [op.type for op in graph.get_operations() if "Gmeta" in op.type]
      []
    """
    tables = PortableTables(unknown)
    token = ACTIVE.set(tables)
    try:
        yield tables
    finally:
        ACTIVE.reset(token)
