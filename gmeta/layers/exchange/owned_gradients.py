"""The gradients that a row's owner gets, among them those of rows without one.

A step may look up keys that the loss doesn't depend on, for example if a feature is read but not used.
TensorFlow leaves such a key out of the `tf.IndexedSlices` of the table's gradient, and the key's row must
stay as it is: with momentum, even an update by zeros would move it. Both ends know the keys, but which keys
have a gradient is known only after the forward pass. So a row of negative zeros travels for each key without
a gradient. A sum of gradients starts from a positive zero and is never a negative zero.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

# Not a Python float: TensorFlow caches their tensors and would return that of 0.0 for -0.0, which is equal.
_NEGATIVE_ZERO = np.float32(-0.0)


class OwnedGradient(NamedTuple):
    """The gradients that an owner received for one table.

    Attributes:
      keys: (n,) int64, as received: by rank, each key once for each rank that has a gradient for it.
      values: (n, dim) float32.
    """

    keys: tf.Tensor
    values: tf.Tensor


def by_key(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Sum a gradient by key: (distinct keys, dim), with negative zeros for keys without a gradient."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    keys = gradient.dense_shape[0]
    sums = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, keys)
    times = tf.math.unsorted_segment_sum(tf.ones_like(gradient.values[:, :1]), gradient.indices, keys)
    return tf.where(times > 0, sums, _NEGATIVE_ZERO)


def present(came: OwnedGradient) -> OwnedGradient:
    """Drop the rows of negative zeros."""
    negative_zero = tf.constant(_NEGATIVE_ZERO.view(np.int32))

    def some() -> OwnedGradient:
        present = tf.reduce_any(tf.bitcast(came.values, tf.int32) != negative_zero, axis=1)
        return OwnedGradient(tf.boolean_mask(came.keys, present), tf.boolean_mask(came.values, present))

    # Usually no gradient is missing. Each row's first number shows that without a pass over all numbers.
    missing = tf.reduce_any(tf.bitcast(came.values[:, 0], tf.int32) == negative_zero)
    return OwnedGradient(*tf.cond(missing, some, lambda: came))
