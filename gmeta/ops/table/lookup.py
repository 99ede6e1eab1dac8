"""The result of a table lookup."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class Lookup(NamedTuple):
    """Result of one lookup. It is independent of other lookups: keep as many at a time as you like.

    Attributes:
      rows: (u, dim) float32, the row of each key. It is a plain tensor: gather from it, watch it in a tape,
        and pass its gradient to `HashTable.apply_gradients` together with ``keys``.
      keys: (u,) int64, the distinct ids, in the order of their first appearance.
      inverse: int32, in the shape of the ids: id number i has row ``rows[inverse[i]]``.
    """

    rows: tf.Tensor
    keys: tf.Tensor
    inverse: tf.Tensor
