"""A model's loss and metrics after several numbers of inner steps, from one lookup a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from gmeta import meta
from gmeta.core.graph.host_ops import shapes_on_host
from gmeta.metrics import TaskMetric
from gmeta.models import MetaModel
from gmeta.models.meta.learner.task_losses import SampleLoss, like_outputs
from gmeta.models.training.ranks.metric_merge import merge_over_ranks
from gmeta.models.training.ranks.step import rank_step


class StepsMetrics:
    """Measures a compiled model on task batches, after each of some numbers of inner steps.

    Its metrics are copies of the model's own, so that those keep what they have measured.

    Args:
      model: A compiled model, whose metrics have been made: it was trained or measured on some batch.
      steps: Numbers of inner steps.
    """

    def __init__(self, model: MetaModel, steps: Sequence[int]) -> None:
        self._model, self._steps = model, steps
        self._loss = SampleLoss(model.loss)
        own = [metric for metric in model.metrics if metric.name != "loss"]
        self._metrics = {
            number: [tf.keras.metrics.Mean(name="loss"), *map(copy.deepcopy, own)] for number in steps
        }
        self._function = self._measure if model.run_eagerly else tf.function(self._measure)

    def reset(self) -> None:
        """Forget what was measured."""
        for metric in self._all:
            metric.reset_state()

    def measure(self, iterator: Any) -> None:
        """Measure the iterator's next batch; on several ranks all of them call it together.

        Raises:
          StopIteration, tf.errors.OutOfRangeError: There is none, or no rank has samples any more.
        """
        self._function(iterator)

    def results(self) -> dict[int, dict[str, float]]:
        """Steps -> metric -> its value, of all ranks' batches since the last reset. All ranks call it."""
        merge_over_ranks(self._all)
        return {
            number: {metric.name: float(metric.result()) for metric in metrics}
            for number, metrics in self._metrics.items()
        }

    @property
    def _all(self) -> list[Any]:
        return [metric for metrics in self._metrics.values() for metric in metrics]

    @tf.autograph.experimental.do_not_convert
    def _measure(self, iterator: Any) -> Any:
        batch = next(iterator)
        with rank_step(self._model, batch["label"]) as step, shapes_on_host():
            predictions = self._model.predict_after(batch, self._steps)
            mask = batch["query"]["mask"]
            labels = tf.gather(batch["label"], batch["query"]["index"])
            for number, metrics in self._metrics.items():
                self._update(metrics, labels, predictions[number], mask)
            return step.end_forward(tf.constant(True))

    def _update(self, metrics: Iterable[Any], labels: tf.Tensor, found: tf.Tensor, mask: tf.Tensor) -> None:
        real, (loss, *others) = mask > 0, metrics
        outputs = found if found.shape.rank == 3 else found[..., tf.newaxis]
        reduction = self._model.reduction
        counted = mask if reduction == "sample" else tf.reduce_any(real, axis=1)
        loss.update_state(
            meta.reduce_tasks(self._loss(labels, outputs), mask, reduction),
            sample_weight=tf.reduce_sum(tf.cast(counted, tf.float32)),
        )
        for metric in others:
            if isinstance(metric, TaskMetric):
                metric.update_state(labels, found, mask)
            else:
                metric.update_state(
                    tf.boolean_mask(like_outputs(labels), real), tf.boolean_mask(outputs, real)
                )
