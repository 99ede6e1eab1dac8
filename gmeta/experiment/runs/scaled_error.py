"""The squared error in units of the labels' spread, so that one learning rate suits labels of any size."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class ScaledError(tf.keras.losses.Loss):
    r"""Mean of :math:`((y - \hat y) / \sigma)^2` over outputs.

    Args:
      deviation: :math:`\sigma`, the labels' standard deviation.

    Shapes:
      Labels (..., outputs) and predictions (..., outputs) -> losses (...).
    """

    def __init__(self, deviation: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.deviation = deviation

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Compute the loss of each sample."""
        return tf.reduce_mean(tf.square((tf.cast(y_true, y_pred.dtype) - y_pred) / self.deviation), axis=-1)
