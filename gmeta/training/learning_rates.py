"""Sets an optimizer's rate by a schedule that is made when `fit` begins."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.schedules import OneCycle, Warmup
from gmeta.core.step import StepCallback


class RateInFit(StepCallback):
    """Sets the Keras optimizer's rate by a schedule that is made when `fit` begins.

    It is for a schedule whose number of steps isn't known before. An optimizer takes any other schedule in
    place of its rate. Tables whose optimizer has no rate of its own follow.

    Args:
      make: A function that returns the schedule, of the rate that the optimizer was compiled with, and of the
        number of steps of this `fit` (None if its data have an unknown length).

    Raises:
      ConfigError: When training begins, the optimizer's rate is a schedule, which would set it too.
    """

    def __init__(self, make: Callable[[float, int | None], Callable[[tf.Tensor], tf.Tensor]]) -> None:
        super().__init__()
        self._make = make
        self._compiled: float | None = None
        self._last: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the schedule."""
        optimizer = self.model.optimizer
        own = getattr(optimizer, "_learning_rate", None)
        if isinstance(own, tf.keras.optimizers.schedules.LearningRateSchedule):
            raise ConfigError(
                f"{type(self).__name__}: the optimizer's rate is a {type(own).__name__}, which sets the rate "
                "too: compile with a number"
            )
        if self._compiled is None:
            self._compiled = float(optimizer.learning_rate)
        batches = self.params.get("steps")
        schedule = self._make(self._compiled, int(batches) * int(self.params["epochs"]) if batches else None)
        self._rate = tf.function(lambda: schedule(optimizer.iterations))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the next step, if it is another one."""
        rate = float(self._rate())
        if rate != self._last:
            self.model.optimizer.learning_rate = self._last = rate


# Callbacks of the last release, by their old names in `gmeta.callbacks`.


def warmup_callback(steps: int) -> RateInFit:
    """Make the callback that was ``gmeta.callbacks.LearningRateWarmup``."""
    _advise("LearningRateWarmup", f"Warmup(rate, steps={steps}, start=1 / ranks)")
    Warmup(0.0, steps)
    return RateInFit(lambda rate, _: Warmup(rate, steps, 1 / collectives.world().shares.total))


def one_cycle_callback(steps: int | None = None, warm_up: float = 0.3) -> RateInFit:
    """Make the callback that was ``gmeta.callbacks.OneCycle``; ``steps`` None: those of `fit`."""
    _advise("OneCycle", f"OneCycle(rate, steps={'...' if steps is None else steps})")
    OneCycle(0.0, 1 if steps is None else steps, warm_up)

    def make(rate: float, of_fit: int | None) -> OneCycle:
        all_steps = steps or of_fit
        if all_steps is None:
            raise ConfigError(
                "OneCycle: the number of batches in an epoch is unknown: give OneCycle(steps=...), or "
                "fit(steps_per_epoch=...)"
            )
        return OneCycle(rate, all_steps, warm_up)

    return RateInFit(make)


def _advise(old: str, new: str) -> None:
    warnings.warn(
        f"gmeta.callbacks.{old} goes in the next release: give the optimizer the schedule "
        f"gmeta.optimizers.{new} in place of its rate",
        DeprecationWarning,
        stacklevel=3,
    )
