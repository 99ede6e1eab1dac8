"""Gathers the vectors of a sample's ids, pools them if wanted, and joins those of several tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from gmeta.layers.embedding.feature_config import Combiner, Join
from gmeta.layers.embedding.ids import Ids
from gmeta.ops.native_forms import on_gpu


def pool(rows: tf.Tensor, positions: Ids, combiner: Combiner | None) -> Any:
    """Gather rows and, with a combiner, reduce those of each sample.

    Args:
      rows: (unique, dim).
      positions: Indices into the rows: a Tensor, or ragged; of shape (samples, length) with a combiner.
      combiner: See `gmeta.layers.FeatureConfig`.

    Returns:
      (samples, dim) with a combiner. Without one, the positions' shape followed by (dim,), ragged if the
      positions are.
    """
    if isinstance(positions, tf.RaggedTensor):
        if combiner is None:
            return positions.with_flat_values(tf.gather(rows, positions.flat_values))
        return _pool_lists(rows, positions, _SEGMENTS[combiner])
    vectors = tf.gather(rows, positions)
    if combiner is None:
        return vectors
    total = tf.reduce_sum(vectors, axis=1)
    if combiner == "sum":
        return total
    count = tf.cast(tf.shape(positions)[1], rows.dtype)
    return tf.math.divide_no_nan(total, tf.sqrt(count) if combiner == "sqrtn" else count)


def join_vectors(vectors: Sequence[Any], how: Join | None) -> Any:
    """Make one vector of those that the tables of a feature have for the same ids.

    Args:
      vectors: What `pool` returned for each table: (..., dim), all dense or all ragged with equal splits.
      how: See ``join`` of `gmeta.layers.FeatureConfig`; None: there is only one table.
    """
    if how is None:
        (vector,) = vectors
        return vector
    if isinstance(vectors[0], tf.RaggedTensor):
        flat = join_vectors([each.flat_values for each in vectors], how)
        return vectors[0].with_flat_values(flat)
    return tf.add_n(vectors) if how == "sum" else tf.concat(vectors, axis=-1)


def _pool_lists(rows: tf.Tensor, positions: tf.RaggedTensor, reduce: Any) -> tf.Tensor:
    """Pool in one pass over the rows. A separate gather would write a vector for each id and reread it."""
    samples, ids = positions.nrows(), positions.flat_values
    if on_gpu():  # its kernels refuse an empty reduction over a tensor without rows
        rows = tf.cond(tf.shape(rows)[0] > 0, lambda: rows, lambda: tf.zeros([1, rows.shape[1]], rows.dtype))
    # Without any id, TensorFlow leaves the gradient's memory uninitialised. So append a sample that reads
    # row 0 and cut it off again: it gives the row a gradient of 0.
    lonely = tf.cast((tf.size(ids) == 0) & (tf.shape(rows)[0] > 0), samples.dtype)
    ids = tf.concat([ids, tf.zeros([lonely], ids.dtype)], 0)
    segments = tf.concat([positions.value_rowids(), tf.fill([lonely], samples)], 0)
    return reduce(rows, ids, segments, num_segments=samples + lonely)[:samples]


_SEGMENTS = {
    "sum": tf.sparse.segment_sum,
    "mean": tf.sparse.segment_mean,
    "sqrtn": tf.sparse.segment_sqrt_n,
}


def _differentiable_twice(gradient_op: str, reduce: Any) -> None:
    """Let TensorFlow differentiate a segment reduction twice, as second-order adaptation of rows does.

    The reduction is linear in its rows, so the gradient of its gradient is the reduction itself.
    """

    def gradient(op: tf.Operation, upstream: tf.Tensor) -> tuple[tf.Tensor, None, None, None]:
        _, indices, segments, _ = op.inputs
        samples = tf.shape(op.inputs[0])[0]
        return reduce(upstream, indices, segments, num_segments=samples), None, None, None

    with suppress(KeyError):  # this TensorFlow already has the gradient
        tf.RegisterGradient(gradient_op)(gradient)


for _pooling, _op in (("sum", "Sum"), ("mean", "Mean"), ("sqrtn", "SqrtN")):
    _differentiable_twice(f"SparseSegment{_op}Grad", _SEGMENTS[_pooling])
