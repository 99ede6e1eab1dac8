"""Where a training step's time goes: per epoch in TensorBoard, and a summary with advice at the end."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.callbacks.step_advice import summary
from gmeta.callbacks.step_clock import PARTS, StepClock, StepSeconds
from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.step_callback import StepCallback
from gmeta.models.training.pipeline.steps_ahead import StepsAhead

Function = Callable[[Any], Any]


class StepTimes(StepCallback):
    """Measures the parts of a `gmeta.models.MetaModel`'s step: data, lookup, inner, outer, update.

    Every k-th step is run in a graph of its own, in which a `gmeta.callbacks.step_clock.StepClock` marks
    where parts end. All other steps run in the graph that training without this callback has, so they cost
    nothing more. The price is a second tracing of the step, and on a GPU that a measured step is waited for.

    At the end of each epoch the milliseconds of the parts go to TensorBoard, as ``step_ms/data`` and so on,
    with their sum ``step_ms/all``. When training ends, a summary is printed: the parts and their shares,
    which is the slowest, and what to change. On several ranks both are means over all of them, shown by rank
    0.

    "data" is the time in which a step waits for its batch. Work of Keras and of callbacks between the steps
    is in no part. Where steps of several batches are one call (``steps_per_execution``), all are measured.

    Args:
      log_dir: TensorBoard's folder, which it shares with `tf.keras.callbacks.TensorBoard`. None: only the
        summary.
      every: Measure every k-th step. The training's first is never measured, for TensorBoard draws the plain
        graph, which is traced in it; nor is the first that is run to be measured, as memory is got in it.
      print_fn: Is called with the summary; `print` where it isn't said.

    Attributes:
      times: What was measured since training began, of all ranks.

    Raises:
      ConfigError: ``every`` is below 1.

    Example:
      ::

        model.fit(data, epochs=30, callbacks=[gmeta.callbacks.StepTimes(log_dir="runs/a/tensorboard")])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        every: int = 10,
        print_fn: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__()
        if every < 1:
            raise ConfigError(f"StepTimes: every must be at least 1, got {every}")
        self.times = StepSeconds({})
        self._log_dir = log_dir
        self._every = every
        self._print = print_fn or print
        self._writer: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Set everything to zero."""
        self.times = StepSeconds({})
        self._clock = StepClock()
        self._function: Function | None = None  # made anew: the model may have been compiled anew
        self._calls, self._settled = 0, False
        if self._log_dir is not None and collectives.world().rank == 0:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let the next step be measured, if it is one of those."""
        self._forget_first()
        if self._calls == 1 or (self._calls and self._calls % self._every == 0):
            if self._function is None:
                self._function = self._measured_function()
            self.model.train_function = functools.partial(self._run, self.model.train_function)
        self._calls += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the epoch's means."""
        self._forget_first()
        times = self._of_all_ranks(self._clock.read())
        self._clock.reset()
        self.times += times
        if self._writer is None or not times.steps:
            return
        with self._writer.as_default(step=epoch):
            for part in PARTS:
                tf.summary.scalar(f"step_ms/{part}", times.milliseconds(part))
            tf.summary.scalar("step_ms/all", 1e3 * times.total / times.steps)

    def on_train_end(self, logs: Any = None) -> None:
        """Print the summary."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if collectives.world().rank == 0:
            inner = getattr(self.model, "inner", None)
            self._print(summary(self.times, collectives.world().size, inner))

    def _forget_first(self) -> None:
        if self._calls > 1 and not self._settled:
            self._clock.reset()
            self._settled = True

    def _run(self, plain: Function, iterator: Any) -> Any:
        """A step that is measured; the model is then as it was."""
        model = self.model
        model.train_function = plain
        step = model.train_step

        def train_step(data: Any) -> Any:
            self._clock.mark("data", data)
            return step(data)

        model.step_clock, model.train_step = self._clock, train_step
        try:
            assert self._function is not None
            return self._function(iterator)
        finally:
            del model.train_step
            model.step_clock = None

    def _measured_function(self) -> Function:
        """Keras' train function, traced anew, between a clock's start and stop."""
        model, clock = self.model, self._clock
        kept = model.train_function, model.train_tf_function
        inside = model.make_train_function(force=True)
        model.train_function, model.train_tf_function = kept

        @tf.autograph.experimental.do_not_convert
        def measure(iterator: Any) -> Any:
            with tf.control_dependencies([clock.start()]):
                logs = inside(iterator)
            with tf.control_dependencies(_ops_of(logs)):
                # On a GPU all of a step's kernels run in one order, so the last to be asked for is a witness.
                clock.stop(*(variable.read_value() for variable in model.trainable_variables[:1]))
            return logs

        graph = not (model.run_eagerly or isinstance(inside, StepsAhead))  # StepsAhead is not of one graph
        return tf.function(measure, reduce_retracing=True) if graph else measure

    def _of_all_ranks(self, times: StepSeconds) -> StepSeconds:
        if collectives.world().size == 1:
            return times
        own = tf.constant([*(times.seconds[part] for part in PARTS), times.steps], tf.float64)
        (totals,) = collectives.allreduce_sum([own], name="step_times")
        *seconds, steps = totals.numpy().tolist()
        return StepSeconds(dict(zip(PARTS, seconds, strict=True)), steps)


def _ops_of(logs: Any) -> list[Any]:
    return [] if tf.executing_eagerly() else tf.nest.flatten(logs)
