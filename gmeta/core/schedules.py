"""Schedules of the learning rate, for Keras' optimizers and for those of tables.

`gmeta.optimizers` exports them. The rate of a step is computed in float64, and rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number, whole_number


class _Share(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that scales the highest rate for each step."""

    def __init__(self, learning_rate: float, steps: int) -> None:
        kind = type(self).__name__
        self.learning_rate = finite_number(f"{kind}: learning_rate", learning_rate)
        if learning_rate < 0:
            raise ConfigError(f"{kind}: learning_rate must be at least 0, got {learning_rate}")
        self.steps = whole_number(f"{kind}: steps", steps, least=1)

    def __call__(self, step: Any) -> tf.Tensor:
        """Return the rate of a step, () float32."""
        rate = tf.cast(tf.constant(self.learning_rate, tf.float32), tf.float64)
        return tf.cast(rate * self.share(tf.cast(step, tf.float64)), tf.float32)

    def share(self, step: tf.Tensor) -> tf.Tensor:
        """Compute the fraction of the highest rate for a step, () float64; the first step is 0."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this schedule."""
        return {"learning_rate": self.learning_rate, "steps": self.steps}


@tf.keras.saving.register_keras_serializable("gmeta")
class Warmup(_Share):
    r"""A rate that rises linearly to its full value, then stays constant.

    In step s, counted from 0, it is

    .. math:: \eta \left(a + (1 - a) \min\left(1, \frac{s}{steps}\right)\right)

    With N ranks of equal batches, a step has N times as many samples, for which N times the rate of one rank
    is usual, but too high for the first steps: start at the rate of one rank, ``start=1 / N`` (Goyal et al.,
    "Accurate, Large Minibatch SGD", section 2.2).

    Args:
      learning_rate: η.
      steps: Number of steps until the full rate.
      start: a, the fraction of the rate in the first step, from 0 to 1.

    Raises:
      ConfigError: A number is out of its range.

    Example:
      >>> ranks = 4  # on all of them: gmeta.core.collectives.world().shares.total
      >>> rate = Warmup(1e-3 * ranks, steps=1000, start=1 / ranks)
      >>> [round(float(rate(step)), 6) for step in (0, 500, 1000, 2000)]
      [0.001, 0.0025, 0.004, 0.004]
      >>> optimizer = tf.keras.optimizers.Adam(rate)
    """

    def __init__(self, learning_rate: float, steps: int, start: float = 0.0) -> None:
        super().__init__(learning_rate, steps)
        if not 0.0 <= start <= 1.0:
            raise ConfigError(f"Warmup: start must be from 0 to 1, got {start}")
        self.start = start

    def share(self, step: tf.Tensor) -> tf.Tensor:
        """Compute the fraction of the full rate for a step, () float64; the first step is 0."""
        return self.start + (1 - self.start) * tf.minimum(step, float(self.steps)) / self.steps

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this schedule."""
        return {**super().get_config(), "start": self.start}


@tf.keras.saving.register_keras_serializable("gmeta")
class OneCycle(_Share):
    r"""A rate that rises from 0 to its highest value, then falls to 0, over an entire training.

    In step s of S, counted from 0, with w the fraction of steps in which the rate rises:

    .. math:: \eta_s = \eta \min\left(\frac{s + 1}{w S},\
       \frac{1}{2} \left(1 + \cos \pi \frac{\max(s - w S,\ 0)}{S - w S}\right)\right)

    Smith and Topin, "Super-Convergence" (2018), section 3, with a cosine in place of the second line.

    Args:
      learning_rate: η.
      steps: S, all steps of the training; after them, the rate is 0.
      warm_up: w, above 0 and below 1.

    Raises:
      ConfigError: A number is out of its range.

    Example:
      >>> rate = OneCycle(5e-3, steps=1000)
      >>> [round(float(rate(step)), 6) for step in (0, 150, 300, 650, 1000)]
      [1.7e-05, 0.002517, 0.005, 0.0025, 0.0]
      >>> optimizer = tf.keras.optimizers.Adam(rate)
    """

    def __init__(self, learning_rate: float, steps: int, warm_up: float = 0.3) -> None:
        super().__init__(learning_rate, steps)
        if not 0.0 < warm_up < 1.0:
            raise ConfigError(f"OneCycle: warm_up must be above 0 and below 1, got {warm_up}")
        self.warm_up = warm_up

    def share(self, step: tf.Tensor) -> tf.Tensor:
        """Compute the fraction of the highest rate for a step, () float64; the first step is 0."""
        rise = self.warm_up * self.steps
        fallen = tf.minimum(tf.maximum(step - rise, 0.0) / (self.steps - rise), 1.0)
        return tf.minimum((step + 1) / rise, 0.5 * (1 + tf.cos(math.pi * fallen)))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this schedule."""
        return {**super().get_config(), "warm_up": self.warm_up}
