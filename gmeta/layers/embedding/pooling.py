"""The vectors of a sample's ids, one by one or as one vector."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import tensorflow as tf

from gmeta.layers.embedding.feature_config import Combiner
from gmeta.layers.embedding.ids import Ids
from gmeta.ops.native_forms import on_gpu


def pool(rows: tf.Tensor, positions: Ids, combiner: Combiner | None) -> Any:
    """Gather rows and, where there is a combiner, reduce those of each sample.

    Args:
      rows: (unique, dim).
      positions: Indices into the rows: a Tensor, or ragged; of shape (samples, length) for a combiner.
      combiner: See `gmeta.layers.FeatureConfig`.

    Returns:
      (samples, dim) with a combiner; without, the positions' shape and (dim,), ragged where they are.
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


def _pool_lists(rows: tf.Tensor, positions: tf.RaggedTensor, reduce: Any) -> tf.Tensor:
    """One pass over the rows; a gather before would write a vector for each id and read it again."""
    samples, ids = positions.nrows(), positions.flat_values
    if on_gpu():  # whose kernels refuse to reduce none of no rows
        rows = tf.cond(tf.shape(rows)[0] > 0, lambda: rows, lambda: tf.zeros([1, rows.shape[1]], rows.dtype))
    # Without any id, TensorFlow leaves the gradient's memory as it was. Row 0 in a sample more, cut off
    # again, has a gradient of 0.
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

    with suppress(KeyError):  # a TensorFlow that has it
        tf.RegisterGradient(gradient_op)(gradient)


for _pooling, _op in (("sum", "Sum"), ("mean", "Mean"), ("sqrtn", "SqrtN")):
    _differentiable_twice(f"SparseSegment{_op}Grad", _SEGMENTS[_pooling])
