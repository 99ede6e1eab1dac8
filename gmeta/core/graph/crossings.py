"""Takes tensors of host memory out of a function and into its next call without a visit to the GPU.

TensorFlow passes each result of a ``tf.function`` through an op, which it places on the GPU if there is one.
So a result that was computed in host memory is copied there, and back when the next call needs it in host
memory. Of tensors of int32 TensorFlow knows that they stay in host memory. A tensor therefore leaves and
enters as the int32 numbers that its bits are.
"""

from __future__ import annotations

import tensorflow as tf

_CROSS_AS_INT32 = (tf.int64, tf.float32, tf.float64)


def to_caller(tensor: tf.Tensor) -> tf.Tensor:
    """Return what a function should return for a tensor of host memory, so that it stays there.

    Example:
      >>> ids = tf.constant([3, 1 << 40], tf.int64)
      >>> from_caller(to_caller(ids), tf.int64).numpy()
      array([            3, 1099511627776])
    """
    if not _crosses(tensor.dtype):
        return tensor
    with tf.device("CPU:0"):
        return tf.bitcast(tensor, tf.int32)


def from_caller(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the tensor of a dtype that `to_caller` was given."""
    if tensor.dtype == dtype:
        return tensor
    with tf.device("CPU:0"):
        return tf.bitcast(tensor, dtype)


def _crosses(dtype: tf.DType) -> bool:
    return bool(tf.config.get_visible_devices("GPU")) and dtype in _CROSS_AS_INT32
