"""Turns what users pass to the ops into tensors, or says clearly why it can't."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError

# Integers that fit int64 whatever their value.
_INTEGERS = (tf.int64, tf.int32, tf.int16, tf.int8, tf.uint32, tf.uint16, tf.uint8)


def ids_tensor(ids: Any, owner: str, argument: str = "ids") -> tf.Tensor:
    """``ids`` as an int64 tensor of their own shape.

    Raises:
      ConfigError: They are not integers, or of a type that doesn't fit int64.
    """
    tensor = tf.convert_to_tensor(ids)  # without a dtype hint, which would make integers of booleans
    no_ids = not tf.is_tensor(ids) and tensor.shape.num_elements() == 0  # [] is float32 to TensorFlow
    if tensor.dtype not in _INTEGERS and not no_ids:
        raise ConfigError(f"{owner}: {argument} must be integers (int64), got dtype {tensor.dtype.name}")
    return tf.cast(tensor, tf.int64)


def keys_vector(keys: Any, owner: str) -> tf.Tensor:
    """``keys`` as an int64 vector.

    Raises:
      ConfigError: They are not integers, or not of rank 1.
    """
    tensor = ids_tensor(keys, owner, "keys")
    if tensor.shape.rank not in (None, 1):
        raise ConfigError(f"{owner}: keys must be a vector, got shape {tensor.shape}")
    return tensor


def float_matrix(values: Any, owner: str, argument: str, rows: tf.Tensor, width: int) -> tf.Tensor:
    """``values`` as a float32 matrix with a row of ``width`` numbers for each of ``rows``.

    Raises:
      ConfigError: Another dtype, or a shape that can't be that.
    """
    tensor = tf.convert_to_tensor(values, dtype_hint=tf.float32)
    if tensor.dtype != tf.float32:
        raise ConfigError(f"{owner}: {argument} must be float32, got dtype {tensor.dtype.name}")
    expected = tf.TensorShape([rows.shape[0], width])
    if not tensor.shape.is_compatible_with(expected):
        raise ConfigError(f"{owner}: {argument} must have shape {expected}, got {tensor.shape}")
    return tensor
