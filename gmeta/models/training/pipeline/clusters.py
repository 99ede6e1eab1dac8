"""Brings the units of a batch, such as samples, into an order in which a micro-batch's share keys.

The paper names the aim (NestPipe, section V: key-centric clustering of samples) and no algorithm; this is
that of `gmeta.ops.keys.window.cluster_units`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from gmeta.models.training.pipeline.units import even_units
from gmeta.ops import Jagged, jagged
from gmeta.ops.keys.window import cluster_units

_ODD = 0x2545F4914F6CDD1D  # multiplication by it changes no two numbers into one


def cluster(model: Any, data: Any, micro_batches: int) -> Any:
    """Return a batch whose units, divided evenly into micro-batches, share keys within each.

    Args:
      model: The model, whose `unit_keys` says what keys a unit has.
      data: The batch.
      micro_batches: Their number.
    """
    keys, units = model.unit_keys(data)
    with tf.device("CPU:0"):
        even = even_units(model.count_units(data), micro_batches)
        order = cluster_units(keys, units, tf.stack([tf.size(each, tf.int64) for each in even]))
    (arranged,) = model.split_batch(data, [order])
    return arranged


def column_keys(columns: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the integers and texts of columns as keys, and in which row each is.

    The keys of two columns differ, also for equal numbers.

    Args:
      columns: A nest of tensors, dense, ragged, sparse or `Jagged`; those of other types are left out.

    Returns:
      (n,) int64 keys, and (n,) int64 rows.
    """
    found = []
    with tf.device("CPU:0"):
        for name, column in _columns(columns, ""):
            values, rows = _entries(column)
            if values.dtype == tf.string:
                values = tf.strings.to_hash_bucket_fast(values, 2**63 - 1)
            salt = zlib.crc32(name.encode())
            found.append(((tf.cast(values, tf.int64) + salt) * _ODD, rows))
        if not found:
            return tf.zeros([0], tf.int64), tf.zeros([0], tf.int64)
        keys, rows = zip(*found, strict=True)
        return tf.concat(keys, axis=0), tf.concat(rows, axis=0)


def _columns(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping):
        for name, part in data.items():
            yield from _columns(part, f"{path}/{name}")
    elif isinstance(data, list | tuple) and not isinstance(data, Jagged):
        for number, part in enumerate(data):
            yield from _columns(part, f"{path}/{number}")
    elif data is not None:
        dtype = data.values.dtype if isinstance(data, Jagged) else data.dtype
        if dtype.is_integer or dtype == tf.string:
            yield path, data


def _entries(column: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the entries of a column, and in which row each is."""
    if isinstance(column, Jagged):
        return _flat(column.values, tf.cast(jagged.row_ids(column), tf.int64))
    if isinstance(column, tf.SparseTensor):
        return column.values, column.indices[:, 0]
    if isinstance(column, tf.RaggedTensor):
        rows = column.value_rowids()
        while isinstance(column.values, tf.RaggedTensor):
            column = column.values
            rows = tf.gather(rows, column.value_rowids())
        return _flat(column.values, tf.cast(rows, tf.int64))
    return _flat(column, tf.range(tf.shape(column, tf.int64)[0]))


def _flat(values: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Flatten (n, ...) values, given the row of each of the n."""
    width = tf.reduce_prod(tf.shape(values, tf.int64)[1:])
    return tf.reshape(values, [-1]), tf.repeat(rows, width)
