"""Loss and AUC for ratings as binary labels: at least so many stars, or fewer.

The labels stay ratings. So the same batches serve regression and classification, and ranking metrics keep
their gains.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


class RatedAtLeast(tf.keras.losses.Loss):
    r"""Binary cross-entropy of :math:`1[rating \geq r]` and a logit.

    Args:
      rating: r.

    Shapes:
      Ratings (..., 1) and logits (..., 1) -> losses (...).
    """

    def __init__(self, rating: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rating = rating

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Compute the loss of each sample."""
        liked = tf.cast(y_true >= self.rating, y_pred.dtype)
        # A NaN is of neither class, so that the loss is NaN too.
        liked = tf.where(tf.math.is_nan(tf.cast(y_true, tf.float32)), tf.constant(np.nan, liked.dtype), liked)
        return tf.keras.losses.binary_crossentropy(liked, y_pred, from_logits=True)


class RatedAtLeastAUC(tf.keras.metrics.AUC):
    """Area under the ROC curve of "rated at least so much", computed from logits over all samples together.

    It uses Keras' 200 thresholds, and so approximates `gmeta.experiment.results.metrics.auc`, which is exact
    and needs all predictions.

    Args:
      rating: A sample with at least this rating is positive.
    """

    def __init__(self, rating: float, name: str = "auc", **kwargs: Any) -> None:
        super().__init__(name=name, from_logits=True, **kwargs)
        self.rating = rating

    def update_state(self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: Any = None) -> Any:
        """Add a batch of samples to the metric."""
        return super().update_state(tf.cast(y_true >= self.rating, tf.float32), y_pred, sample_weight)
