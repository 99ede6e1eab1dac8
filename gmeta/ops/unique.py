"""The distinct ids of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.native import load_op_library
from gmeta.ops._arguments import ids_tensor
from gmeta.ops.portable import is_portable
from gmeta.ops.table_device import DEVICE_NAMES, Place

_native = load_op_library("ops")
tf.no_gradient("GmetaUnique")


class Unique(NamedTuple):
    """Distinct keys and where they stood.

    Attributes:
      keys: (u,) int64, distinct, in the order of their first appearance.
      inverse: int32, of the shape of the ids: ``tf.gather(keys, inverse)`` is the ids again.
    """

    keys: tf.Tensor
    inverse: tf.Tensor


def unique(ids: Any, *, device: Place = "cpu") -> Unique:
    """The distinct ids of a tensor of any shape, and the way back.

    Args:
      ids: Integers of any shape; any int64 is a valid id.
      device: Where it is computed, and where the result is: ``"cpu"``, where ids mostly are, or ``"gpu"``,
        the first that this process sees.

    Returns:
      A `Unique`.

    Raises:
      ConfigError: ``ids`` are not integers.

    Example:
      >>> keys, inverse = unique([[7, 3], [7, 9]])
      >>> keys.numpy()
      array([7, 3, 9])
      >>> inverse.numpy()
      array([[0, 1],
             [0, 2]], dtype=int32)
    """
    ids = ids_tensor(ids, "unique")
    if is_portable():
        keys, inverse = tf.unique(tf.reshape(ids, [-1]))
        return Unique(keys, tf.reshape(inverse, tf.shape(ids)))
    with tf.device(DEVICE_NAMES[device]):
        return Unique(*_native.gmeta_unique(ids=ids))
