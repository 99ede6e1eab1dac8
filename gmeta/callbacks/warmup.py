"""A learning rate that begins at one rank's and grows to that of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.step_callback import StepCallback


class LearningRateWarmup(StepCallback):
    r"""Raises the Keras optimizer's learning rate from 1/N-th of what it was compiled with, in equal steps.

    N ranks of equal batches make a step with N times as many samples, for which a rate N times that of one
    rank is usual, but too much for the first steps (Goyal et al., "Accurate, Large Minibatch SGD", section
    2.2). In step s, counted from 0, the rate is

    .. math:: \eta \left(\frac{1}{N} + \frac{N - 1}{N} \min\left(1, \frac{s}{steps}\right)\right)

    with :math:`\eta` what the optimizer was compiled with. Tables whose optimizer has no rate of its own
    follow. With one rank the rate stays what it is. All ranks make the same steps, so it is the same on all
    of them.

    Args:
      steps: After how many steps the rate is there. Steps before `fit`, such as those that a checkpoint has
        restored, count too.

    Raises:
      ConfigError: ``steps`` is below 1; or, when training begins, the optimizer's rate is a schedule, which
        would set it too.

    Example:
      ::

        model.compile(tf.keras.optimizers.Adam(1e-3 * collectives.world().shares.total), loss)
        model.fit(data, callbacks=[LearningRateWarmup(steps=1000)])
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        if steps < 1:
            raise ConfigError(f"LearningRateWarmup: steps must be at least 1, got {steps}")
        self.steps = steps
        self._rate: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Take the rate that is to be reached."""
        optimizer = self.model.optimizer
        schedule = getattr(optimizer, "_learning_rate", None)
        if isinstance(schedule, tf.keras.optimizers.schedules.LearningRateSchedule):
            raise ConfigError(
                f"LearningRateWarmup: the optimizer's rate is a {type(schedule).__name__}; put the warm-up "
                "into the schedule, or compile with a number"
            )
        if self._rate is None:
            self._rate = float(optimizer.learning_rate)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the step that is to come, until it is there."""
        size = collectives.world().shares.total  # an elastic job may have fewer ranks, and the same steps
        done = int(self.model.optimizer.iterations)
        if size > 1 and self._rate is not None and done <= self.steps:
            share = 1 / size + (1 - 1 / size) * done / self.steps
            self.model.optimizer.learning_rate = self._rate * share
