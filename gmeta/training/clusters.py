"""Brings the units of a batch, such as samples, into an order in which a micro-batch's share keys.

The paper names the aim (NestPipe, section V: key-centric clustering of samples) without an algorithm; the
algorithm here is that of `gmeta.ops.distinct.cluster_units`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import refuse_unless
from gmeta.ops import Jagged, jagged
from gmeta.ops.distinct import cluster_units

# Takes some units of a batch, such as samples, along the first dimension of its tensors.


def count_units(name: str, data: Any) -> tf.Tensor:
    """Return the first dimension of all parts of a batch, () int64.

    Args:
      name: The name of the model that is trained.
      data: The batch: a nest of tensors, dense, ragged, sparse or `Jagged`, and None.

    Raises:
      ConfigError: The parts have different first dimensions (in a graph, raised as by
        `gmeta.core.graph.refuse_unless`), or one has none.
    """
    sizes = [_size(name, part) for part in _parts(data) if part is not None]
    if not sizes:
        raise ConfigError(f"{name}: micro_batches divide a batch, and this one has no tensors")
    alike = tf.reduce_all(tf.stack(sizes) == sizes[0])
    told = (
        f"{name}: micro_batches divide a batch by its first dimension, which its parts don't have in common"
    )
    count: tf.Tensor = refuse_unless(sizes[0], alike, told)
    return count


def take_units(data: Any, units: tf.Tensor) -> Any:
    """Return a batch of some units.

    Args:
      data: The batch, as for `count_units`.
      units: (n,) int64, the numbers of the units, each at most once.
    """
    return _map(lambda part: None if part is None else _take(part, units), data)


def even_units(count: tf.Tensor, micro_batches: int) -> list[tf.Tensor]:
    """Divide units into micro-batches: contiguous, of nearly equal size, the first not empty if any isn't."""
    with tf.device("CPU:0"):
        ends = [(count * number + micro_batches - 1) // micro_batches for number in range(micro_batches + 1)]
        return [tf.range(begin, end) for begin, end in pairwise(ends)]


def _take(part: Any, units: tf.Tensor) -> Any:
    if isinstance(part, Jagged):
        whole = jagged.as_jagged(part)
        assert whole is not None
        return jagged.from_ragged(tf.gather(jagged.to_ragged(whole), units))
    if isinstance(part, tf.SparseTensor):
        numbers = tf.tensor_scatter_nd_update(
            tf.fill(part.dense_shape[:1], tf.constant(-1, tf.int64)),
            units[:, tf.newaxis],
            tf.range(_length(units)),
        )
        row = tf.gather(numbers, part.indices[:, 0])
        kept = row >= 0
        indices = tf.concat([row[:, tf.newaxis], part.indices[:, 1:]], axis=1)
        taken = tf.SparseTensor(
            tf.boolean_mask(indices, kept),
            tf.boolean_mask(part.values, kept),
            tf.concat([[_length(units)], part.dense_shape[1:]], axis=0),
        )
        return tf.sparse.reorder(taken)
    return tf.gather(part, units)


def _size(name: str, part: Any) -> tf.Tensor:
    if isinstance(part, Jagged):
        return _length(part.offsets) - 1
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    if tf.convert_to_tensor(part).shape.rank == 0:
        raise ConfigError(
            f"{name}: micro_batches divide a batch by its first dimension, and a part of this one is a "
            "single number: repeat it for each sample, or leave micro_batches out"
        )
    return _length(part)


def _length(vector: Any) -> tf.Tensor:
    return tf.shape(vector, tf.int64)[0]


def _parts(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _parts(value)
    elif isinstance(data, list | tuple) and not isinstance(data, Jagged):
        for value in data:
            yield from _parts(value)
    else:
        yield data


def _map(change: Callable[[Any], Any], data: Any) -> Any:
    if isinstance(data, Mapping):
        return {name: _map(change, value) for name, value in data.items()}
    if isinstance(data, list | tuple) and not isinstance(data, Jagged):
        changed = [_map(change, value) for value in data]
        return type(data)(*changed) if hasattr(data, "_fields") else type(data)(changed)
    return change(data)


_ODD = 0x2545F4914F6CDD1D  # multiplication by it changes no two numbers into one


def cluster(model: Any, data: Any, micro_batches: int) -> Any:
    """Return a batch whose units, divided evenly into micro-batches, share keys within each.

    Args:
      model: The model, whose `unit_keys` returns the keys of units.
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
