"""Learning rate schedules as callbacks: a warm-up from one rank's rate to that of all, and one cycle."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.step_marks import StepCallback


class LearningRateWarmup(StepCallback):
    r"""Raises the Keras optimizer's learning rate from 1/N of its compiled value, in equal steps.

    N ranks of equal batches make a step with N times as many samples, for which a rate N times that of one
    rank is usual, but too much for the first steps (Goyal et al., "Accurate, Large Minibatch SGD", section
    2.2). In step s, counted from 0, the rate is

    .. math:: \eta \left(\frac{1}{N} + \frac{N - 1}{N} \min\left(1, \frac{s}{steps}\right)\right)

    with :math:`\eta` the rate that the optimizer was compiled with. Tables whose optimizer has no rate of its
    own follow. With one rank the rate doesn't change. All ranks make the same steps, so it is the same on all
    of them.

    Args:
      steps: After how many steps the full rate is reached. Steps before `fit`, such as those of a restored
        checkpoint, count too.

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
        """Read the rate to reach."""
        rate = _compiled_rate(self, "put the warm-up into the schedule, or compile with a number")
        if self._rate is None:
            self._rate = rate

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the next step, until the full rate is reached."""
        size = collectives.world().shares.total  # an elastic job may have fewer ranks, and the same steps
        done = int(self.model.optimizer.iterations)
        if size > 1 and self._rate is not None and done <= self.steps:
            share = 1 / size + (1 - 1 / size) * done / self.steps
            self.model.optimizer.learning_rate = self._rate * share


# A learning rate that rises and falls once over a whole training.


class OneCycle(StepCallback):
    r"""Raises the Keras optimizer's learning rate from 0 to its compiled value, and lowers it to 0.

    In step s of S, counted from 0, with w the share of steps in which the rate rises:

    .. math:: \eta_s = \eta \min\left(\frac{s + 1}{w S},\
       \frac{1}{2} \left(1 + \cos \pi \frac{\max(s - w S,\ 0)}{S - w S}\right)\right)

    Tables whose optimizer has no rate of its own follow. Smith and Topin, "Super-Convergence" (2018),
    section 3, with a cosine in place of the second line.

    Args:
      steps: S, all steps of the training, those before `fit` included (such as those that a checkpoint has
        restored); after them the rate is 0. None: Keras' ``epochs`` times the batches of an epoch.
      warm_up: w, above 0 and below 1.

    Raises:
      ConfigError: A number is out of its range; or, when training begins, the optimizer's rate is a schedule,
        which would set it too, or ``steps`` is None and the length of an epoch isn't known.

    Example:
      ::

        model.compile(tf.keras.optimizers.Adam(5e-3), "mse")
        model.fit(gmeta.io.tasks("data/warm", resample=True), epochs=30, callbacks=[OneCycle()])
    """

    def __init__(self, steps: int | None = None, warm_up: float = 0.3) -> None:
        super().__init__()
        self.steps = None if steps is None else whole_number("OneCycle: steps", steps, least=1)
        if not 0.0 < warm_up < 1.0:
            raise ConfigError(f"OneCycle: warm_up must be above 0 and below 1, got {warm_up}")
        self.warm_up = warm_up
        self._rate: float | None = None
        self._steps = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Read the highest rate, and the number of steps."""
        rate = _compiled_rate(self, "it sets the rate too; compile with a number")
        if self._rate is None:
            self._rate = rate
        per_epoch = self.params.get("steps")
        if self.steps is None and not per_epoch:
            raise ConfigError(
                "OneCycle: the number of batches in an epoch is unknown: give OneCycle(steps=...), or "
                "fit(steps_per_epoch=...)"
            )
        self._steps = self.steps or int(per_epoch) * int(self.params["epochs"])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the next step."""
        assert self._rate is not None
        self.model.optimizer.learning_rate = self._rate * self.share(int(self.model.optimizer.iterations))

    def share(self, step: int) -> float:
        """Compute the share of the highest rate that a step has, step 0 being the first."""
        rise = self.warm_up * self._steps
        fallen = min(max(step - rise, 0.0) / (self._steps - rise), 1.0)
        return min((step + 1) / rise, 0.5 * (1 + math.cos(math.pi * fallen)))


def _compiled_rate(callback: StepCallback, advice: str) -> float:
    """Return the learning rate that a callback's model was compiled with.

    Raises:
      ConfigError: The rate is a Keras schedule.
    """
    optimizer = callback.model.optimizer
    schedule = getattr(optimizer, "_learning_rate", None)
    if isinstance(schedule, tf.keras.optimizers.schedules.LearningRateSchedule):
        raise ConfigError(
            f"{type(callback).__name__}: the optimizer's rate is a {type(schedule).__name__}: {advice}"
        )
    return float(optimizer.learning_rate)
