"""Losses and metrics of samples that are grouped into tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.metrics import TaskMetric


class SampleLoss:
    """A Keras loss that isn't reduced over samples.

    Args:
      loss: A Keras loss, its name, or a function.

    Raises:
      ConfigError: The loss is none of these.
    """

    def __init__(self, loss: Any) -> None:
        found = tf.keras.losses.get(loss)
        self._call: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
        if isinstance(found, tf.keras.losses.Loss):
            self._call = found.call
        elif callable(found):
            self._call = found
        else:
            raise ConfigError(f"loss must be a Keras loss, its name or a function, got {loss!r}")
        kind = found if hasattr(found, "__module__") and not isinstance(found, tf.keras.losses.Loss) else None
        self._name = getattr(kind or type(found), "__name__", "loss")
        # Keras' own losses take one output for each label, unless labels are class numbers.
        of_keras = getattr(kind or type(found), "__module__", "").startswith(tf.keras.losses.Loss.__module__)
        self._pairs = of_keras and "sparse" not in self._name.lower()

    def __call__(self, labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Compute losses, (tasks, samples); several outputs are averaged.

        Args:
          labels: (tasks, samples), or (tasks, samples, outputs).
          outputs: (tasks, samples, outputs).

        Raises:
          ConfigError: TensorFlow would repeat labels to match the outputs, or outputs to match the labels; or
            the loss is one number for all samples, which would make tasks depend on each other.
        """
        labels = like_outputs(labels)
        given, made = labels.shape[-1], outputs.shape[-1]
        if self._pairs and None not in (given, made) and given != made:
            raise ConfigError(
                f"labels have {given} value{'s' * (given > 1)} a sample and the network has {made} "
                f"output{'s' * (made > 1)}: {self._name} takes one for each. Read as many labels, "
                "gmeta.io.tasks(label=[...]), or change the network's last layer"
            )
        losses = self._call(labels, outputs)
        if losses.shape.rank not in (None, 2):
            raise ConfigError(
                f"the loss {self._name} must give a value for each sample, (tasks, samples), and gives the "
                f"shape {losses.shape}: a mean in it must be over outputs alone, tf.reduce_mean(..., axis=-1)"
            )
        return losses


def like_outputs(labels: tf.Tensor) -> tf.Tensor:
    """Return labels as (tasks, samples, outputs)."""
    return labels if labels.shape.rank == 3 else labels[..., tf.newaxis]


def without_single_output(outputs: tf.Tensor) -> tf.Tensor:
    """Return (tasks, samples) if there is one output, otherwise the outputs unchanged."""
    return tf.squeeze(outputs, axis=-1) if outputs.shape[-1] == 1 else outputs


class TaskMetrics:
    """The metrics that see whole tasks."""

    def __init__(self, metrics: list[TaskMetric]) -> None:
        self.metrics = metrics

    @classmethod
    def among(cls, metrics: Any) -> tuple[TaskMetrics, Any]:
        """Split the metrics passed to `compile` into task metrics and the others, which go to Keras."""
        if isinstance(metrics, TaskMetric):
            return cls([metrics]), None
        if not isinstance(metrics, list | tuple):
            return cls([]), metrics
        own = [metric for metric in metrics if isinstance(metric, TaskMetric)]
        return cls(own), [metric for metric in metrics if not isinstance(metric, TaskMetric)]

    def update(self, labels: tf.Tensor, outputs: tf.Tensor, mask: tf.Tensor) -> None:
        """Update the metrics with a batch of tasks."""
        for metric in self.metrics:
            metric.update_state(labels, without_single_output(outputs), mask)
