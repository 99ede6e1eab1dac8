"""The vectors of a sample's ids, one by one or as one vector."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.layers.feature_config import Pooling
from gmeta.layers.feature_ids import Ids


def pool(rows: tf.Tensor, positions: Ids, pooling: Pooling | None) -> Any:
    """Gather rows and, where there is a pooling, reduce those of each sample.

    Args:
      rows: (unique, dim).
      positions: Indices into the rows: a Tensor, or ragged; of shape (samples, length) for a pooling.
      pooling: See `gmeta.layers.FeatureConfig`.

    Returns:
      (samples, dim) with a pooling; without, the positions' shape and (dim,), ragged where they are.
    """
    if isinstance(positions, tf.RaggedTensor):
        vectors = tf.gather(rows, positions.flat_values)
        if pooling is None:
            return positions.with_flat_values(vectors)
        total = tf.math.unsorted_segment_sum(vectors, positions.value_rowids(), positions.nrows())
        count = tf.cast(positions.row_lengths(), rows.dtype)[:, tf.newaxis]
    else:
        vectors = tf.gather(rows, positions)
        if pooling is None:
            return vectors
        total = tf.reduce_sum(vectors, axis=1)
        count = tf.cast(tf.shape(positions)[1], rows.dtype)
    if pooling == "sum":
        return total
    return tf.math.divide_no_nan(total, tf.sqrt(count) if pooling == "sqrtn" else count)
