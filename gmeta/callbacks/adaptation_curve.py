"""Measures the error of held-out tasks after several numbers of inner steps, epoch by epoch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import shapes_on_host
from gmeta.meta.inner_loop import reduce_tasks
from gmeta.metrics.ranking import TaskMetric
from gmeta.models import MetaModel
from gmeta.models.meta.task_losses import SampleLoss, like_outputs
from gmeta.training.rank_data import rank_dataset
from gmeta.training.rank_steps import merge_over_ranks, rank_step

# A model's loss and metrics after several numbers of inner steps, from one lookup a batch.


class StepsMetrics:
    """Measures a compiled model on task batches, after each of some numbers of inner steps.

    Its metrics are copies of the model's own, whose results stay unchanged.

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
          StopIteration, tf.errors.OutOfRangeError: The iterator is exhausted, or no rank has samples left.
        """
        self._function(iterator)

    def results(self) -> dict[int, dict[str, float]]:
        """Return steps -> metric -> value over all ranks' batches since the last reset. All ranks call it."""
        merge_over_ranks(self._all)
        return {
            number: {metric.name: float(metric.result()) for metric in metrics}
            for number, metrics in self._metrics.items()
        }

    @property
    def _all(self) -> list[Any]:
        return [metric for metrics in self._metrics.values() for metric in metrics]

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
            reduce_tasks(self._loss(labels, outputs), mask, reduction),
            sample_weight=tf.reduce_sum(tf.cast(counted, tf.float32)),
        )
        for metric in others:
            if isinstance(metric, TaskMetric):
                metric.update_state(labels, found, mask)
            else:
                metric.update_state(
                    tf.boolean_mask(like_outputs(labels), real), tf.boolean_mask(outputs, real)
                )


class AdaptationCurve(tf.keras.callbacks.Callback):
    """Measures held-out tasks after several numbers of inner steps, at the end of epochs.

    The loss and every metric that the model was compiled with get a value for each number of steps, in the
    logs, as ``val_mae@0``, ``val_mae@1``, …. So `History`, the progress bar and TensorBoard show them, and
    ``EarlyStopping(monitor="val_mae@5")`` or ``CSVLogger`` can use them; callbacks that do must come after
    this one in ``fit``'s list.

    A batch is looked up once, and the steps are taken one after another: five steps continue from the weights
    after one. Numbers may be larger than the inner loop's own. `fit` itself measures ``val_mae`` after
    ``inner.evaluation_steps``.

    On several ranks the values are those of all ranks' tasks. Each measures its part of the data, as in
    `fit`.

    Args:
      data: Task batches to measure. None: `fit`'s validation data, read a second time.
      steps: Numbers of inner steps, none negative.
      every: Measure after every n-th epoch. As with Keras' ``validation_freq``, other epochs' logs have no
        values, which ``CSVLogger`` doesn't support.

    Attributes:
      values: What was measured last: steps -> metric -> value.

    Raises:
      ConfigError: ``steps`` or ``every`` are invalid; or, in `fit`, the model takes no inner steps, or
        there is no data.

    Example:
      ::

        curve = gmeta.callbacks.AdaptationCurve(steps=(0, 1, 5))
        stop = tf.keras.callbacks.EarlyStopping("val_mae@5", patience=3)
        history = model.fit(tasks, epochs=30, validation_data=cold, callbacks=[curve, stop]).history
        history["val_mae@0"], history["val_mae@5"]
    """

    def __init__(self, data: Any = None, steps: Sequence[int] = (0, 1, 5), *, every: int = 1) -> None:
        super().__init__()
        given = list(steps) if isinstance(steps, Iterable) else []
        if not given or len(set(given)) < len(given):
            raise ConfigError(f"AdaptationCurve: steps must be different numbers from 0 on, got {steps!r}")
        steps = [whole_number("AdaptationCurve: each of steps", number) for number in given]
        every = whole_number("AdaptationCurve: every", every, least=1)
        if data is not None and not isinstance(data, tf.data.Dataset):
            raise ConfigError(
                f"AdaptationCurve: data must be a tf.data.Dataset of task batches, got {type(data).__name__}"
            )
        self.values: dict[int, dict[str, float]] = {}
        self._data, self._steps, self._every = data, tuple(steps), every
        self._part: Any = None
        self._metrics: StepsMetrics | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Take this rank's part of the data."""
        if not isinstance(self.model, MetaModel):
            raise ConfigError(
                f"AdaptationCurve: {type(self.model).__name__} takes no inner steps; it is for a "
                "gmeta.models.MetaModel"
            )
        self._metrics = None  # the model may have been compiled again
        if self._data is not None:
            several = collectives.world().shares.total > 1
            self._part = rank_dataset(self._data, shuffle=False, shard=several).dataset

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Measure, and put the values into the logs."""
        if (epoch + 1) % self._every:
            return
        if self._metrics is None:
            self._metrics = StepsMetrics(self.model, self._steps)
        self._metrics.reset()
        dataset, batches = self._measured_data()
        iterator = iter(dataset)
        with suppress(StopIteration, tf.errors.OutOfRangeError):
            for _ in itertools.count() if batches is None else range(batches):
                self._metrics.measure(iterator)
        self.values = self._metrics.results()
        named = {
            f"val_{name}@{steps}": value
            for steps, metrics in self.values.items()
            for name, value in metrics.items()
        }
        if logs is not None:
            logs.update(named)

    def _measured_data(self) -> tuple[tf.data.Dataset, int | None]:
        """Return the data, and how many of its batches to measure; None: all."""
        if self._data is not None:
            return self._part, None
        # Keras passes its validation data to no callback. It has made a data set of it by now, on several
        # ranks of this rank's part, and keeps that until `fit` is over.
        handler = getattr(self.model, "_eval_data_handler", None)
        if handler is None:
            raise ConfigError(
                "AdaptationCurve has nothing to measure: pass it a data set of task batches, data=..., or "
                "give fit one as validation_data; with validation_freq, measure no earlier than fit (every=)"
            )
        return handler._dataset, handler.inferred_steps
