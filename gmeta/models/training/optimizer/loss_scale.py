"""Applies the loss scaling of a Keras optimizer, which ``mixed_float16`` needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.models.training.optimizer.packed_gradients import Gradient


class LossScale:
    """The loss scaling of a ``LossScaleOptimizer``: scales losses and unscales gradients.

    With any other optimizer it changes nothing.

    Args:
      optimizer: A Keras optimizer. None: no scaling.
    """

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = optimizer if hasattr(optimizer, "get_scaled_loss") else None

    @property
    def skips_bad_steps(self) -> bool:
        """Whether the optimizer skips steps whose gradients aren't finite."""
        return self._optimizer is not None and self._optimizer.dynamic

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Scale the loss before differentiation; call this inside the tape."""
        return loss if self._optimizer is None else self._optimizer.get_scaled_loss(loss)

    def unscale(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Compute the gradients of the loss from those of the scaled loss."""
        if self._optimizer is None:
            return list(gradients)
        return self._optimizer.get_unscaled_gradients(gradients)
