"""Converts users' inputs of the ops to tensors, or raises clear errors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError


def ids_tensor(ids: Any, owner: str, argument: str = "ids") -> tf.Tensor:
    """Convert ``ids`` to an int64 tensor of the same shape; uint64 are taken as the int64 of the same bits.

    Raises:
      ConfigError: The ids are not integers.
    """
    tensor = integers_of(ids)  # without a dtype hint, which would turn booleans into integers
    no_ids = not tf.is_tensor(ids) and tensor.shape.num_elements() == 0  # [] is float32 to TensorFlow
    if not tensor.dtype.is_integer and not no_ids:
        raise ConfigError(f"{owner}: {argument} must be integers (int64), got dtype {tensor.dtype.name}")
    return tf.cast(tensor, tf.int64)


def integers_of(ids: Any) -> tf.Tensor:
    """Convert ``ids`` to a tensor as TensorFlow does, but uint64 to int64 of the same bits.

    Hashes of other systems are uint64. What is below 2^63 stays itself, so that a column of ids may come as
    either.

    Raises:
      ConfigError: The ids are Python integers from 2^63 on, which TensorFlow doesn't convert.
    """
    try:
        ids = tf.convert_to_tensor(ids)
    except ValueError as error:
        if "out-of-range integer" not in str(error):
            raise
        raise ConfigError(
            "ids are Python integers that don't fit int64: pass them as numpy.array(ids, numpy.uint64), "
            "which is taken as the int64 of the same bits"
        ) from error
    return tf.bitcast(ids, tf.int64) if ids.dtype == tf.uint64 else ids


def keys_vector(keys: Any, owner: str) -> tf.Tensor:
    """Convert ``keys`` to an int64 vector.

    Raises:
      ConfigError: The keys are not integers, or not of rank 1.
    """
    tensor = ids_tensor(keys, owner, "keys")
    if tensor.shape.rank not in (None, 1):
        raise ConfigError(f"{owner}: keys must be a vector, got shape {tensor.shape}")
    return tensor


def float_matrix(values: Any, owner: str, argument: str, rows: tf.Tensor, width: int) -> tf.Tensor:
    """Convert ``values`` to a float32 matrix with a row of ``width`` numbers for each of ``rows``.

    Raises:
      ConfigError: The values have another dtype or an incompatible shape.
    """
    tensor = tf.convert_to_tensor(values, dtype_hint=tf.float32)
    if tensor.dtype != tf.float32:
        raise ConfigError(f"{owner}: {argument} must be float32, got dtype {tensor.dtype.name}")
    expected = tf.TensorShape([rows.shape[0], width])
    if not tensor.shape.is_compatible_with(expected):
        raise ConfigError(f"{owner}: {argument} must have shape {expected}, got {tensor.shape}")
    return tensor
