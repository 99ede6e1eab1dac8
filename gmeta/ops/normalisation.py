"""Norms of a token's numbers: each token by itself, so that no token depends on another."""

from __future__ import annotations

import tensorflow as tf

from gmeta.core.native import load_op_library
from gmeta.ops.attention_device import DTYPES, built_with_cuda, on_gpu
from gmeta.ops.portable import is_portable

_native = load_op_library("ops")
_WIDEST = 4096  # of the GPU's kernels


def layer_norm(
    x: tf.Tensor, scale: tf.Tensor | None = None, offset: tf.Tensor | None = None, eps: float = 1e-6
) -> tf.Tensor:
    r"""Layer norm, :math:`\gamma (x - \bar{x}) / \sqrt{\mathrm{var}(x) + \epsilon} + \beta`.

    Statistics are of float32 at least, whatever the dtype of x. On a GPU, matrices of bfloat16 and float16
    are normed in one pass over memory, and one back.

    Args:
      x: (..., d) float.
      scale: γ, (d,) or one for each token, (..., d). None: 1.
      offset: β, likewise. None: 0.
      eps: ε.

    Returns:
      (..., d) of the dtype of x.
    """
    if _has_kernel(x, scale, offset):
        weights = [
            tf.zeros([0], x.dtype) if each is None else tf.cast(each, x.dtype) for each in (scale, offset)
        ]
        return _native.gmeta_row_norm(x, *weights, epsilon=eps).y
    return _plain(x, scale, offset, eps)


def _has_kernel(x: tf.Tensor, scale: tf.Tensor | None, offset: tf.Tensor | None) -> bool:
    if x.dtype not in DTYPES or is_portable() or not (on_gpu() and built_with_cuda()):
        return False
    width = x.shape[-1]
    if (
        x.shape.rank != 2
        or width is None
        or width % 8
        or width > _WIDEST
        or (scale is None) != (offset is None)
    ):
        return False
    return scale is None or scale.shape.rank == 1


def _plain(x: tf.Tensor, scale: tf.Tensor | None, offset: tf.Tensor | None, eps: float) -> tf.Tensor:
    exact = _exact(x)
    centred = exact - tf.reduce_mean(exact, axis=-1, keepdims=True)
    normed = tf.cast(_over_root_mean_square(centred, eps), x.dtype)
    normed = normed if scale is None else normed * scale
    return normed if offset is None else normed + offset


def rms_norm(x: tf.Tensor, eps: float = 1e-6) -> tf.Tensor:
    r"""Norm by the root of the mean square, :math:`x / \sqrt{\overline{x^2} + \epsilon}`.

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
def _gradient(op: tf.Operation, of_y: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
    eps = op.get_attr("epsilon")
    return list(_native.gmeta_row_norm_gradient(*op.inputs, op.outputs[1], of_y, epsilon=eps))


@tf.RegisterGradient("GmetaRowNormGradient")
def _second_gradient(op: tf.Operation, *upstream: tf.Tensor) -> list[tf.Tensor | None]:
    """By the plain form, in float32: for inner loops that adapt what is below a norm."""
    x, scale, offset, _, of_y = op.inputs
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
    return [of_x, of_scale, of_offset, None, of_of_y]
