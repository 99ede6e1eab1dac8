"""Converts users' inputs of the ops to tensors, or raises clear errors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError

# Integer types whose values all fit int64.
_INTEGERS = (tf.int64, tf.int32, tf.int16, tf.int8, tf.uint32, tf.uint16, tf.uint8)


def ids_tensor(ids: Any, owner: str, argument: str = "ids") -> tf.Tensor:
    """Convert ``ids`` to an int64 tensor of the same shape.

    Raises:
      ConfigError: The ids are not integers, or their type doesn't fit int64.
    """
    tensor = tf.convert_to_tensor(ids)  # without a dtype hint, which would turn booleans into integers
    no_ids = not tf.is_tensor(ids) and tensor.shape.num_elements() == 0  # [] is float32 to TensorFlow
    if tensor.dtype not in _INTEGERS and not no_ids:
        raise ConfigError(f"{owner}: {argument} must be integers (int64), got dtype {tensor.dtype.name}")
    return tf.cast(tensor, tf.int64)


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
