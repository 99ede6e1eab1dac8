"""Ranking metrics that are means over tasks: NDCG and grouped AUC."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import refuse_numbers
from gmeta.metrics.auc import are_positive

# The places of a task's samples in the order of its predictions, ties included.


def below(predictions: tf.Tensor, real: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Count the samples of the same task that are predicted lower, and those that aren't predicted higher.

    It takes one sort and two binary searches per task, O(Q log Q), where comparing all pairs would take Q².

    Args:
      predictions: (T, Q) finite floats.
      real: (T, Q) bool: False in the padding, which isn't counted.

    Returns:
      (T, Q) int32: real samples with a lower prediction; (T, Q) int32: those and the ones with the same
      prediction, the sample itself included. In the padding they mean nothing.

    Example:
      >>> lower, not_higher = below(tf.constant([[3.0, 1.0, 3.0]]), tf.constant([[True, True, True]]))
      >>> lower.numpy().tolist(), not_higher.numpy().tolist()
      ([[1, 0, 1]], [[3, 1, 3]])
    """
    ascending = tf.sort(tf.where(real, predictions, float("inf")), axis=1)  # so that padding comes last
    return (
        tf.searchsorted(ascending, predictions, side="left"),
        tf.searchsorted(ascending, predictions, side="right"),
    )


# The base of metrics that are a weighted mean over tasks.

_NOT_GIVEN: Any = object()


class TaskMetric(tf.keras.metrics.Metric):
    r"""A metric of whole tasks: :math:`\sum_t w_t m_t / \sum_t w_t` over all tasks t since the last reset.

    A subclass defines `task_values`, which computes :math:`m_t` and :math:`w_t` of many tasks at once. Two
    sums are kept, in float64 and with the aggregation SUM, so that the metric of several ranks, of several
    batches, or of the parts of a resumed epoch is that of all their tasks.

    Use it in ``compile(metrics=[...])`` of a `gmeta.models.MetaModel`, which passes it the tasks' query
    samples; models without tasks are refused.

    If any real prediction isn't finite, the result is nan until the next reset: the run has diverged, and a
    mean over the rest would hide it. If no task counts, it is nan too.

    Args:
      name: What the logs call it.
      dtype: Of the sums and so of the result.

    Example:
      >>> class Best(TaskMetric):
      ...     '''How often the item that is predicted highest is one that was rated highest.'''
      ...
      ...     def task_values(self, labels, predictions, real):
      ...         shown = tf.argmax(tf.where(real, predictions, predictions.dtype.min), axis=1)
      ...         best = tf.reduce_max(tf.where(real, labels, labels.dtype.min), axis=1)
      ...         hit = tf.gather(labels, shown, axis=1, batch_dims=1) == best
      ...         return tf.cast(hit, labels.dtype), tf.cast(tf.reduce_any(real, axis=1), labels.dtype)
      >>> metric = Best(name="best")
      >>> metric.update_state([[5.0, 3.0], [2.0, 4.0]], [[0.9, 0.1], [0.7, 0.3]], tf.ones([2, 2]))
      >>> float(metric.result())
      0.5
    """

    def __init__(self, name: str | None = None, dtype: Any = "float64") -> None:
        super().__init__(name=name, dtype=dtype)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.weight = self.add_weight(name="weight", initializer="zeros")

    def task_values(
        self, labels: tf.Tensor, predictions: tf.Tensor, real: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute the tasks' values and weights.

        Args:
          labels: (T, Q) float64, 0 in the padding.
          predictions: (T, Q) float64, 0 in the padding and where they aren't finite.
          real: (T, Q) bool: False in the padding.

        Returns:
          (T,) values; (T,) weights, not negative, 0 for a task that is left out, whatever its value is.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it measures: define task_values")

    # AutoGraph would rewrite it for nothing, and wrap its errors.
    @tf.autograph.experimental.do_not_convert
    def update_state(
        self, labels: Any, predictions: Any, mask: Any = None, sample_weight: Any = _NOT_GIVEN
    ) -> None:
        """Add a batch of tasks.

        Args:
          labels: (T, Q) numbers.
          predictions: (T, Q) floats.
          mask: (T, Q): above 0 for a real sample. None: all are. Padding is ignored, even nan.
          sample_weight: Don't pass it: Keras does where a model has no tasks, which is refused.

        Raises:
          ConfigError: The shapes aren't those of tasks, or the model has no tasks.
        """
        if sample_weight is not _NOT_GIVEN:
            raise ConfigError(
                f"{self.name}: {type(self).__name__} measures whole tasks, but this model hands its metrics "
                "samples: compile a gmeta.models.MetaModel with it, or call "
                "update_state(labels, predictions, mask) yourself"
            )
        labels = tf.cast(tf.convert_to_tensor(labels), tf.float64)
        predictions = tf.cast(tf.convert_to_tensor(predictions), tf.float64)
        real = tf.ones_like(labels, tf.bool) if mask is None else tf.convert_to_tensor(mask) > 0
        self._check_shapes(labels, predictions, real)
        finite = tf.math.is_finite(predictions)
        values, weights = self.task_values(
            tf.where(real, labels, 0), tf.where(real & finite, predictions, 0), real
        )
        total = tf.reduce_sum(tf.where(weights > 0, weights * values, 0))
        diverged = tf.reduce_any(real & ~finite)
        total = tf.where(diverged, tf.constant(float("nan"), total.dtype), total)
        self.total.assign_add(tf.cast(total, self.total.dtype))
        self.weight.assign_add(tf.cast(tf.reduce_sum(weights), self.weight.dtype))

    def result(self) -> tf.Tensor:
        """Return the mean over tasks, a scalar; nan if no task has counted."""
        return self.total / self.weight

    def _check_shapes(self, *tensors: tf.Tensor) -> None:
        first = tensors[0].shape
        if first.rank != 2 or any(not first.is_compatible_with(tensor.shape) for tensor in tensors):
            shapes = ", ".join(str(tensor.shape) for tensor in tensors)
            raise ConfigError(
                f"{self.name}: labels, predictions and mask must each be (tasks, samples), got {shapes}; "
                "pass one output of a model that has several"
            )


@tf.keras.saving.register_keras_serializable("gmeta")
class NDCG(TaskMetric):
    r"""Normalized discounted cumulative gain at ``k``, per task, mean over tasks.

    .. math:: \mathrm{nDCG@}k = \mathrm{DCG@}k / \mathrm{IDCG@}k, \quad
       \mathrm{DCG@}k = \sum_{i=1}^{k} \frac{2^{r_i} - 1}{\log_2(i + 1)}

    with :math:`r_i` the label of the sample that is predicted i-th highest, and IDCG the same for the order
    of descending labels. Samples with equal predictions share the mean of their gains, so that the order of
    the rows has no influence: a model that predicts the same for all samples scores like a random order. A
    task with fewer than two samples, or whose gains are all zero, has no order to judge and is left out.
    `gmeta.experiment.results.metrics.ndcg` is the reference for these numbers.

    Järvelin and Kekäläinen (2002), with the gain of Burges et al. (2005).

    Args:
      k: Ranks that count, at least 1; a task with fewer samples is ranked whole.
      name: By default ``"ndcg@k"``.
      dtype: Of the sums.

    Shapes:
      ``update_state(labels (T, Q), predictions (T, Q), mask (T, Q))``; labels are ratings from 0 to 1000,
      with gains 2^r - 1.

    Raises:
      ConfigError: ``k`` is below 1; or in `update_state` a label is negative, NaN, or 1000 or more.

    Example:
      >>> metric = NDCG(1)
      >>> metric.update_state([[3.0, 1.0]], [[0.2, 0.9]], tf.ones([1, 2]))
      >>> round(float(metric.result()), 3)  # gain 1 of a possible 7
      0.143
    """

    def __init__(self, k: int, name: str | None = None, dtype: Any = "float64") -> None:
        k = whole_number("NDCG: k", k, least=1)
        super().__init__(name=name or f"ndcg@{k}", dtype=dtype)
        self.k = k

    def task_values(
        self, labels: tf.Tensor, predictions: tf.Tensor, real: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute the tasks' nDCG, and a weight of 1 for those that have an order."""
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
        """Return (size + 1,): the sum of the discounts of the first 0, 1, … ranks."""
        ranks = tf.range(1, size + 1)
        single = tf.math.log(tf.constant(2.0, tf.float64)) / tf.math.log(tf.cast(ranks + 1, tf.float64))
        return tf.concat([tf.zeros([1], tf.float64), tf.cumsum(tf.where(ranks <= self.k, single, 0))], axis=0)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this metric."""
        return {**super().get_config(), "k": self.k}


# The area under the ROC curve, taken task by task.


@tf.keras.saving.register_keras_serializable("gmeta")
class GAUC(TaskMetric):
    r"""Grouped AUC: each task's own AUC, weighted by its samples.

    .. math:: \mathrm{GAUC} = \frac{\sum_t n_t \mathrm{AUC}_t}{\sum_t n_t}

    :math:`\mathrm{AUC}_t` is the chance that a positive sample of task t is predicted above a negative one of
    the same task; ties count half. It is exact, from the order of the predictions, with no thresholds.
    :math:`n_t` is the number of the task's samples. A task with samples of one class only has no AUC and is
    left out, of both sums.

    Unlike the pooled `tf.keras.metrics.AUC`, it doesn't reward predicting which users click often, but only
    the order of a user's own items. Zhou et al., "Deep Interest Network for Click-Through Rate Prediction"
    (KDD 2018), section 6.3, there with impressions as weights.

    Args:
      positive: The least label that is positive, such as 4 for ratings of 1 to 5. None: labels are 0 or 1.
      name: What the logs call it.
      dtype: Of the sums.

    Shapes:
      ``update_state(labels (T, Q), predictions (T, Q), mask (T, Q))``; predictions may be any scores, such as
      logits.

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
        """Compute the tasks' AUC, and their numbers of samples, or 0 for a task of one class."""
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
        """Return the arguments that recreate this metric."""
        return {**super().get_config(), "positive": self.positive}
