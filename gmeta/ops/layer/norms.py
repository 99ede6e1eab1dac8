"""Norms that treat each token by itself, so that no token depends on another."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.native import load_op_library
from gmeta.ops.native_forms import has_row_kernels

_native = load_op_library("ops")
_WIDEST = 4096  # the greatest width that the GPU's kernels take


def layer_norm(
    x: tf.Tensor, scale: tf.Tensor | None = None, offset: tf.Tensor | None = None, eps: float = 1e-6
) -> tf.Tensor:
    r"""Compute layer norm, :math:`\gamma (x - \bar{x}) / \sqrt{\mathrm{var}(x) + \epsilon} + \beta`.

    Statistics are in float32 at least, whatever the dtype of x. On a GPU, matrices of bfloat16 and float16
    take one pass over memory, and one for the gradient.

    Args:
      x: (..., d) float.
      scale: γ, (d,) or one for each token, (..., d). None: 1.
      offset: β, (d,) or one for each token, (..., d). None: 0.
      eps: ε.

    Returns:
      (..., d) of the dtype of x.
    """
    if _has_kernel(x, scale, offset):
        return _norm(x, scale, offset, eps, passes=False).y
    return _plain(x, scale, offset, eps)


def norm_and_pass(
    x: tf.Tensor, scale: tf.Tensor | None = None, offset: tf.Tensor | None = None, eps: float = 1e-6
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute `layer_norm` of x, and pass x on for a second use, such as a residual connection.

    On a GPU, the pass that computes the norm's gradient also adds the gradient of the second use.

    Args:
      x: (..., d) float.
      scale: As in `layer_norm`.
      offset: As in `layer_norm`.
      eps: As in `layer_norm`.

    Returns:
      The normed x, and x.
    """
    if _has_kernel(x, scale, offset):
        found = _norm(x, scale, offset, eps, passes=True)
        return found.y, found.passed
    return _plain(x, scale, offset, eps), x


def _norm(x: tf.Tensor, scale: tf.Tensor | None, offset: tf.Tensor | None, eps: float, passes: bool) -> Any:
    none = tf.zeros([0], x.dtype)
    weights = [none if each is None else tf.cast(each, x.dtype) for each in (scale, offset)]
    return _native.gmeta_row_norm(x, *weights, epsilon=eps, passes=passes)


def _has_kernel(x: tf.Tensor, scale: tf.Tensor | None, offset: tf.Tensor | None) -> bool:
    if not has_row_kernels(x) or x.shape[1] > _WIDEST or (scale is None) != (offset is None):
        return False
    return scale is None or scale.shape.rank == 1


def _plain(x: tf.Tensor, scale: tf.Tensor | None, offset: tf.Tensor | None, eps: float) -> tf.Tensor:
    exact = _exact(x)
    centred = exact - tf.reduce_mean(exact, axis=-1, keepdims=True)
    normed = tf.cast(_over_root_mean_square(centred, eps), x.dtype)
    normed = normed if scale is None else normed * scale
    return normed if offset is None else normed + offset


def rms_norm(x: tf.Tensor, eps: float = 1e-6) -> tf.Tensor:
    r"""Divide by the root of the mean square, :math:`x / \sqrt{\overline{x^2} + \epsilon}`.

    Args:
      x: (..., d) float.
      eps: ε.

    Returns:
      (..., d) of the dtype of x.
    """
    return tf.cast(_over_root_mean_square(_exact(x), eps), x.dtype)


def _exact(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


def _over_root_mean_square(x: tf.Tensor, eps: float) -> tf.Tensor:
    return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), axis=-1, keepdims=True) + eps)


@tf.RegisterGradient("GmetaRowNorm")
def _gradient(op: tf.Operation, of_y: tf.Tensor, _: tf.Tensor, of_passed: tf.Tensor) -> list[tf.Tensor]:
    if not op.get_attr("passes"):
        of_passed = tf.zeros([0], of_y.dtype)
    eps = op.get_attr("epsilon")
    return list(_native.gmeta_row_norm_gradient(*op.inputs, op.outputs[1], of_y, of_passed, epsilon=eps))


@tf.RegisterGradient("GmetaRowNormGradient")
def _second_gradient(op: tf.Operation, *upstream: tf.Tensor) -> list[tf.Tensor | None]:
    """Differentiate the plain form, in float32, for inner loops that adapt weights below a norm."""
    x, scale, offset, _, of_y, of_passed = op.inputs
    wide = [tf.cast(each, tf.float32) for each in (x, scale, offset, of_y)]
    with tf.GradientTape() as outer:
        outer.watch(wide)
        with tf.GradientTape() as inner:
            inner.watch(wide[:3])
            gamma, beta = wide[1:3] if scale.shape[0] else (None, None)
            y = _plain(wide[0], gamma, beta, op.get_attr("epsilon"))
        zero = tf.UnconnectedGradients.ZERO
        first = inner.gradient(y, wide[:3], wide[3], unconnected_gradients=zero)
    found = outer.gradient(
        first, wide, [tf.cast(each, tf.float32) for each in upstream], unconnected_gradients=zero
    )
    of_x, of_scale, of_offset, of_of_y = (tf.cast(each, x.dtype) for each in found)
    return [of_x, of_scale, of_offset, None, of_of_y, None if of_passed.shape == [0] else upstream[0]]
