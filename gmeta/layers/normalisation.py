"""Norms of a token's numbers: each token by itself, so that no token depends on another."""

from __future__ import annotations

import tensorflow as tf


def layer_norm(
    x: tf.Tensor, scale: tf.Tensor | None = None, offset: tf.Tensor | None = None, eps: float = 1e-6
) -> tf.Tensor:
    r"""Layer norm, :math:`\gamma (x - \bar{x}) / \sqrt{\mathrm{var}(x) + \epsilon} + \beta`.

    Statistics are of float32 at least, whatever the dtype of x.

    Args:
      x: (..., d) float.
      scale: γ, (d,) or one for each token, (..., d). None: 1.
      offset: β, likewise. None: 0.
      eps: ε.

    Returns:
      (..., d) of the dtype of x.
    """
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
