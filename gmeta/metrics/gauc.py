"""The area under the ROC curve, taken task by task."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.metrics.order import below
from gmeta.metrics.sample_metric import are_positive
from gmeta.metrics.task_metric import TaskMetric


@tf.keras.saving.register_keras_serializable("gmeta")
class GAUC(TaskMetric):
    r"""Grouped AUC: each task's own AUC, weighted by its samples.

    .. math:: \mathrm{GAUC} = \frac{\sum_t n_t \mathrm{AUC}_t}{\sum_t n_t}

    :math:`\mathrm{AUC}_t` is the chance that a positive sample of task t is predicted above a negative one of
    the same task; ties count half. It is exact, from the order of the predictions, with no thresholds.
    :math:`n_t` is the number of the task's samples. A task with samples of one class only has no AUC and is
    left out, of both sums.

    Unlike the pooled `tf.keras.metrics.AUC`, it doesn't reward knowing which users click much: only how a
    user's own items are ordered. Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (KDD
    2018), section 6.3, there with impressions as weights.

    Args:
      positive: The least label that is positive, such as 4 for ratings of 1 to 5. None: labels are 0 or 1.
      name: What the logs call it.
      dtype: Of the sums.

    Shapes:
      ``update_state(labels (T, Q), predictions (T, Q), mask (T, Q))``; any score will do as a prediction,
      logits too.

    Raises:
      ConfigError: In `update_state`: a label is NaN, or without ``positive`` neither 0 nor 1.

    Example:
      >>> metric = GAUC()
      >>> metric.update_state([[1.0, 0.0], [1.0, 1.0]], [[0.3, 0.2], [0.1, 0.9]], tf.ones([2, 2]))
      >>> float(metric.result())  # of the first task: the second has no negative sample
      1.0
    """

    def __init__(self, positive: float | None = None, name: str = "gauc", dtype: Any = "float64") -> None:
        super().__init__(name=name, dtype=dtype)
        self.positive = positive

    def task_values(
        self, labels: tf.Tensor, predictions: tf.Tensor, real: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The tasks' AUC, and their numbers of samples, or 0 for a task of one class."""
        clicked = tf.cast(real & are_positive(labels, self.positive, self.name), tf.float64)
        samples = tf.reduce_sum(tf.cast(real, tf.float64), axis=1)
        positives = tf.reduce_sum(clicked, axis=1)
        lower, not_higher = below(predictions, real)
        # Mann and Whitney: of ranks that count from 1 and that ties share, positives have at least 1 + 2 + …
        # + n.
        ranks = tf.cast(lower + not_higher + 1, tf.float64) / 2
        above = tf.reduce_sum(clicked * ranks, axis=1) - positives * (positives + 1) / 2
        pairs = positives * (samples - positives)
        return tf.math.divide_no_nan(above, pairs), tf.where(pairs > 0, samples, 0)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this metric again."""
        return {**super().get_config(), "positive": self.positive}
