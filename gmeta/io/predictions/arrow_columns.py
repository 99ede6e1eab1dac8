"""Tensors as Arrow columns: a row of the table for each entry of the first dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from gmeta.core.errors import ConfigError


def record_batch(columns: Mapping[str, Any]) -> pa.RecordBatch:
    """Make a record batch of tensors with as many rows each.

    Args:
      columns: Name -> a tensor (n, ...) or RaggedTensor (n, ...), eager.

    Returns:
      A scalar of each row is a number, text is binary. A vector is a list of fixed size, and so is each
      further dimension of a dense tensor. A ragged dimension is a large list.

    Raises:
      ConfigError: A value has no first dimension, or columns have different numbers of rows.

    Example:
      >>> record_batch({"user": tf.constant([4, 2]), "vector": tf.zeros([2, 3])}).schema
      user: int32 not null
      vector: fixed_size_list<item: float not null>[3] not null
        child 0, item: float not null
    """
    arrays = {name: _array(name, value) for name, value in columns.items()}
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            "columns of predictions must have a value for each row of the batch, but their numbers of rows "
            "are " + ", ".join(f"{name} {size}" for name, size in sizes.items())
        )
    fields = [pa.field(name, array.type, nullable=False) for name, array in arrays.items()]
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=pa.schema(fields))


def _array(name: str, value: Any) -> pa.Array:
    if isinstance(value, tf.SparseTensor):
        raise ConfigError(f"column {name!r} is a SparseTensor: make it dense or ragged")
    value = value if isinstance(value, tf.RaggedTensor) else tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        raise ConfigError(f"column {name!r} is one number for the whole batch: give a value for each row")
    if not isinstance(value, tf.RaggedTensor):
        return _dense(value)
    array = _dense(value.flat_values)
    for splits in reversed(value.nested_row_splits):
        offsets = pa.array(splits.numpy().astype(np.int64))
        kind = pa.large_list(pa.field("item", array.type, nullable=False))
        array = pa.LargeListArray.from_arrays(offsets, array, type=kind)
    return array


def _dense(tensor: tf.Tensor) -> pa.Array:
    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    values = tensor.numpy()
    flat = values.reshape(-1)
    array = pa.array(flat.tolist(), pa.binary()) if tensor.dtype == tf.string else pa.array(flat)
    for size in reversed(values.shape[1:]):
        kind = pa.list_(pa.field("item", array.type, nullable=False), size)
        array = pa.FixedSizeListArray.from_arrays(array, type=kind)
    return array
