"""What one lookup of a table found."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class Lookup(NamedTuple):
    """What one lookup found. It belongs to the call: hold as many at a time as you like.

    Attributes:
      rows: (u, dim) float32, the row of each key. A plain tensor: gather from it, watch it in a tape, and
        give its gradient to `HashTable.apply_gradients` together with ``keys``.
      keys: (u,) int64, the distinct ids, in the order of their first appearance.
      inverse: int32, of the shape of the ids: id number i has row ``rows[inverse[i]]``.
    """

    rows: tf.Tensor
    keys: tf.Tensor
    inverse: tf.Tensor
