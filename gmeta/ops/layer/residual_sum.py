"""The residual sum of a block: its input plus its output."""

from __future__ import annotations

import tensorflow as tf

from gmeta.core.native import load_op_library
from gmeta.ops.native_forms import has_row_kernels

_native = load_op_library("ops")


def residual(x: tf.Tensor | None, change: tf.Tensor, offset: tf.Tensor | None = None) -> tf.Tensor:
    r"""Add a block's change to its input, :math:`y = x + (c + b)`.

    On a GPU, matrices of bfloat16 and float16 are read once and the sum is rounded once. The gradient of b, a
    sum over rows for each column, is computed in float32 and then rounded. The order of summation is fixed,
    so every run gives the same result.

    Args:
      x: (rows, d) float. None: 0.
      change: c, (rows, d) float.
      offset: b, (d,). None: 0.

    Returns:
      (rows, d) of the dtype of c.

    Raises:
      InvalidArgumentError: Shapes don't fit together.

    Example:
      >>> from gmeta.ops.layer.residual_sum import residual
      >>> residual(tf.ones([2, 1]), tf.ones([2, 1]), tf.constant([0.5])).numpy().tolist()
      [[2.5], [2.5]]
    """
    if has_row_kernels(change):
        none = tf.zeros([0], change.dtype)
        return _native.gmeta_residual(
            none if x is None else x, change, none if offset is None else tf.cast(offset, change.dtype)
        )
    y = change if offset is None else change + offset
    return y if x is None else x + y


@tf.RegisterGradient("GmetaResidual")
def _gradient(op: tf.Operation, of_y: tf.Tensor) -> list[tf.Tensor | None]:
    x, _, offset = op.inputs
    of_x = None if x.shape == [0] else of_y
    return [of_x, of_y, None if offset.shape == [0] else _native.gmeta_column_sums(of_y)]


@tf.RegisterGradient("GmetaColumnSums")
def _gradient_of_sums(op: tf.Operation, of_sums: tf.Tensor) -> tf.Tensor:
    return tf.broadcast_to(of_sums, tf.shape(op.inputs[0]))
