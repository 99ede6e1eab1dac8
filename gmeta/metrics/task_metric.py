"""The base of metrics that are a weighted mean over tasks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError

_NOT_GIVEN: Any = object()


class TaskMetric(tf.keras.metrics.Metric):
    r"""A metric of whole tasks: :math:`\sum_t w_t m_t / \sum_t w_t` over all tasks t since the last reset.

    A subclass says in `task_values` what :math:`m_t` and :math:`w_t` are, for many tasks at once. Two sums
    are kept, in float64 and with the aggregation SUM, so that the metric of several ranks, of several
    batches, or of the parts of a resumed epoch is that of all their tasks.

    Use it in ``compile(metrics=[...])`` of a `gmeta.models.MetaModel`, which hands it the tasks' query
    samples; a model that knows no tasks is refused.

    If any real prediction isn't finite, the result is nan until the next reset: the run has diverged, and a
    mean over what is left would hide it. Without a task that counts it is nan too.

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
        """The tasks' values and weights.

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
          mask: (T, Q): above 0 for a real sample. None: all are. What stands in the padding doesn't matter,
            not even nan.
          sample_weight: Not for use: Keras passes it where a model knows no tasks.

        Raises:
          ConfigError: The shapes aren't those of tasks, or the model knows no tasks.
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
        """The mean over tasks, a scalar; nan if no task has counted."""
        return self.total / self.weight

    def _check_shapes(self, *tensors: tf.Tensor) -> None:
        first = tensors[0].shape
        if first.rank != 2 or any(not first.is_compatible_with(tensor.shape) for tensor in tensors):
            shapes = ", ".join(str(tensor.shape) for tensor in tensors)
            raise ConfigError(
                f"{self.name}: labels, predictions and mask must each be (tasks, samples), got {shapes}; "
                "pass one output of a model that has several"
            )
