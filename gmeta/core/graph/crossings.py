"""Takes tensors of host memory out of a function and into its next call without a visit to the GPU.

TensorFlow passes each result of a ``tf.function`` through an op, which it places on the GPU if there is one.
So a result that was computed in host memory is copied there, and back when the next call needs it in host
memory. Of tensors of int32 TensorFlow knows that they stay in host memory. A tensor therefore leaves and
enters as the int32 numbers that its bits are; a truth value as 0 or 1.

Each result says where it is, because TensorFlow makes a function's ops anew for arguments on other devices.
Random numbers then begin again: a step would drop out what the one before has dropped.
"""

from __future__ import annotations

import tensorflow as tf

_CROSS_AS_INT32 = (tf.int64, tf.float32, tf.float64)


def to_caller(tensor: tf.Tensor, *, on_gpu: bool = False) -> tf.Tensor:
    """Return what a function should return for a tensor, so that it stays where it is.

    Args:
      tensor: Any tensor.
      on_gpu: Whether it is on the GPU; else it is in host memory.

    Example:
      >>> ids = tf.constant([3, 1 << 40], tf.int64)
      >>> from_caller(to_caller(ids), tf.int64).numpy()
      array([            3, 1099511627776])
    """
    if not _has_gpu():
        return tensor
    if on_gpu:
        with tf.device("GPU:0"):
            return tf.identity(tensor)
    with tf.device("CPU:0"):
        if tensor.dtype == tf.bool:
            return tf.cast(tensor, tf.int32)
        return tf.bitcast(tensor, tf.int32) if tensor.dtype in _CROSS_AS_INT32 else tf.identity(tensor)


def from_caller(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the tensor of a dtype that `to_caller` was given."""
    if tensor.dtype == dtype:
        return tensor
    with tf.device("CPU:0"):
        return tf.cast(tensor, dtype) if dtype == tf.bool else tf.bitcast(tensor, dtype)


def _has_gpu() -> bool:
    return bool(tf.config.get_visible_devices("GPU"))
