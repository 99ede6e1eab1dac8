"""The exact area under the ROC curve, of all samples together and user by user."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.metrics.sample_metric import SampleMetric, auc_of_groups


class _GroupedAUC(SampleMetric):
    """The mean of groups' AUC, weighted by their samples."""

    def result(self) -> tf.Tensor:
        """A scalar; nan without samples of both classes, or if a prediction isn't finite."""
        groups, scores, positive, negative = self.samples()
        finite = tf.math.is_finite(scores)
        values, weights = auc_of_groups(groups, tf.where(finite, scores, 0), positive, negative)
        mean = tf.reduce_sum(values * weights) / tf.reduce_sum(weights)
        return tf.cast(tf.where(tf.reduce_all(finite), mean, float("nan")), self.dtype)


@tf.keras.saving.register_keras_serializable("gmeta")
class AUC(_GroupedAUC):
    r"""The area under the ROC curve of all samples, exactly.

    .. math::
       \mathrm{AUC} = \frac{\sum_{i: y_i = 1} \sum_{j: y_j = 0} w_i w_j ([s_i > s_j] + [s_i = s_j] / 2)}
       {\sum_{i: y_i = 1} w_i \sum_{j: y_j = 0} w_j}

    It is the chance that a positive sample is scored above a negative one, by the order of the scores as
    float32. `tf.keras.metrics.AUC` puts scores into 200 bins between 0 and 1 instead: it needs probabilities,
    and the order within a bin is lost, which is where most of rare clicks' predictions lie. This one takes
    logits too, and keeps every sample, 20 bytes each (`gmeta.metrics.sample_metric`). Over several ranks it
    is that of all their samples.

    Args:
      positive: The least label that is positive, such as 4 for ratings of 1 to 5. None: labels are 0 or 1.
      name: What the logs call it.
      dtype: Of the result.

    Example:
      >>> metric = AUC()
      >>> metric.update_state([1.0, 0.0, 1.0, 0.0], [3.0, -1.0, 0.5, 0.5])
      >>> float(metric.result())
      0.875

    References:
      Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic curve"
      (Radiology, 1982).
    """

    def __init__(self, positive: float | None = None, name: str = "auc", dtype: Any = "float64") -> None:
        super().__init__(positive, name, dtype)

    @tf.autograph.experimental.do_not_convert
    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> None:
        """Add samples.

        Args:
          labels: Numbers of any shape.
          predictions: As many, probabilities or logits.
          sample_weight: As many; 0 marks padding, in which nothing matters.

        Raises:
          ConfigError: There aren't as many of each; a label is NaN, or without ``positive`` neither 0 nor 1;
            or a weight is NaN or below 0.
        """
        self.add_samples(labels, predictions, None, sample_weight)


@tf.keras.saving.register_keras_serializable("gmeta")
class UserGAUC(_GroupedAUC):
    r"""Grouped AUC of samples that come with their users: each user's AUC, weighted by its samples.

    .. math:: \mathrm{GAUC} = \frac{\sum_u n_u \mathrm{AUC}_u}{\sum_u n_u}

    The same as `GAUC`, which sees a task's samples together in a row. Here those of a user may be anywhere:
    in several batches, on several ranks. A user with samples of one class only has no AUC and is left out, of
    both sums; :math:`n_u` is the weight of the user's samples. Every sample is kept, 20 bytes each.

    Args:
      positive: The least label that is positive, such as 4 for ratings of 1 to 5. None: labels are 0 or 1.
      name: What the logs call it.
      dtype: Of the result.

    Example:
      >>> metric = UserGAUC()
      >>> metric.update_state([1.0, 0.0, 1.0], [0.3, 0.2, 0.1], users=[8, 8, 9])
      >>> metric.update_state([0.0], [0.5], users=[9])
      >>> float(metric.result())  # 1 of user 8, 0 of user 9
      0.5

    References:
      Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (KDD 2018), section 6.3, with
      impressions as weights.
    """

    def __init__(
        self, positive: float | None = None, name: str = "user_gauc", dtype: Any = "float64"
    ) -> None:
        super().__init__(positive, name, dtype)

    @tf.autograph.experimental.do_not_convert
    def update_state(self, labels: Any, predictions: Any, users: Any, sample_weight: Any = None) -> None:
        """Add samples.

        Args:
          labels: Numbers of any shape.
          predictions: As many, probabilities or logits.
          users: As many integers.
          sample_weight: As many; 0 marks padding, in which nothing matters.

        Raises:
          ConfigError: There aren't as many of each; a label is NaN, or without ``positive`` neither 0 nor 1;
            or a weight is NaN or below 0.
        """
        self.add_samples(labels, predictions, users, sample_weight)
