"""The loss scaling of a Keras optimizer, as ``mixed_float16`` asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.models.training.optimizer.mean_gradients import Gradient


class LossScale:
    """Scales losses and unscales gradients where the optimizer is a ``LossScaleOptimizer``.

    With any other optimizer it changes nothing.

    Args:
      optimizer: A Keras optimizer; None: no scaling.
    """

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = optimizer if hasattr(optimizer, "get_scaled_loss") else None

    @property
    def skips_bad_steps(self) -> bool:
        """Whether the optimizer leaves out steps whose gradients aren't finite."""
        return self._optimizer is not None and self._optimizer.dynamic

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Scale the loss to differentiate; call it inside the tape."""
        return loss if self._optimizer is None else self._optimizer.get_scaled_loss(loss)

    def unscale(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Compute the gradients of the loss from those of the scaled one."""
        if self._optimizer is None:
            return list(gradients)
        return self._optimizer.get_unscaled_gradients(gradients)
