"""Normalized discounted cumulative gain, a mean over tasks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.graph.conditions import refuse_numbers
from gmeta.metrics.order import below
from gmeta.metrics.task_metric import TaskMetric


@tf.keras.saving.register_keras_serializable("gmeta")
class NDCG(TaskMetric):
    r"""Normalized discounted cumulative gain at ``k``, per task, mean over tasks.

    .. math:: \mathrm{nDCG@}k = \mathrm{DCG@}k / \mathrm{IDCG@}k, \quad
       \mathrm{DCG@}k = \sum_{i=1}^{k} \frac{2^{r_i} - 1}{\log_2(i + 1)}

    with :math:`r_i` the label of the sample that is predicted i-th highest, and IDCG the same for the order
    of falling labels. Samples with equal predictions share the mean of their gains, so that the order of the
    rows has no influence: a model that predicts the same for all earns what chance does. A task with fewer
    than two samples, or whose gains are all zero, has no order that could be right or wrong: it is left out.
    These are the numbers of `gmeta.experiment.results.metrics.ndcg`, which is their reference.

    Järvelin and Kekäläinen (2002), with the gain of Burges et al. (2005).

    Args:
      k: Ranks that count, at least 1; a task with fewer samples is ranked whole.
      name: ``"ndcg@k"`` where it isn't said.
      dtype: Of the sums.

    Shapes:
      ``update_state(labels (T, Q), predictions (T, Q), mask (T, Q))``; labels are ratings from 0 to 1000,
      with gains 2^r - 1.

    Raises:
      ConfigError: ``k`` is below 1; or in `update_state` a label is negative, NaN, or 1000 or more.

    Example:
      >>> metric = NDCG(1)
      >>> metric.update_state([[3.0, 1.0]], [[0.2, 0.9]], tf.ones([1, 2]))
      >>> round(float(metric.result()), 3)  # gain 1 where 7 was to be had
      0.143
    """

    def __init__(self, k: int, name: str | None = None, dtype: Any = "float64") -> None:
        k = whole_number("NDCG: k", k, least=1)
        super().__init__(name=name or f"ndcg@{k}", dtype=dtype)
        self.k = k

    def task_values(
        self, labels: tf.Tensor, predictions: tf.Tensor, real: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The tasks' nDCG, and 1 for those that have an order."""
        good = (labels >= 0) & (labels < 1000)
        wanted = f"{self.name}: labels must be at least 0 and below 1000"
        labels = refuse_numbers(labels, good, wanted, "the gain of a label r is 2^r - 1")
        gains = tf.pow(tf.constant(2.0, labels.dtype), labels) - 1
        sizes = tf.reduce_sum(tf.cast(real, tf.int32), axis=1, keepdims=True)
        lower, not_higher = below(predictions, real)
        # Tied samples stand together at the ranks from `first` up to `last`: each has the mean of their
        # discounts.
        first, last = tf.where(real, sizes - not_higher, 0), tf.where(real, sizes - lower, 1)
        up_to = self._discounts_up_to(tf.shape(labels)[1])
        discount = (tf.gather(up_to, last) - tf.gather(up_to, first)) / tf.cast(last - first, gains.dtype)
        ideal = tf.sort(gains, axis=1, direction="DESCENDING") * (up_to[1:] - up_to[:-1])
        best = tf.reduce_sum(ideal, axis=1)
        ordered = (sizes[:, 0] > 1) & (best > 0)
        value = tf.math.divide_no_nan(tf.reduce_sum(gains * discount, axis=1), best)
        return value, tf.cast(ordered, gains.dtype)

    def _discounts_up_to(self, size: tf.Tensor) -> tf.Tensor:
        """(size + 1,): the sum of the discounts of the first 0, 1, … ranks."""
        ranks = tf.range(1, size + 1)
        single = tf.math.log(tf.constant(2.0, tf.float64)) / tf.math.log(tf.cast(ranks + 1, tf.float64))
        return tf.concat([tf.zeros([1], tf.float64), tf.cumsum(tf.where(ranks <= self.k, single, 0))], axis=0)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this metric again."""
        return {**super().get_config(), "k": self.k}
