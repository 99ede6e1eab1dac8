"""The result of a train step's forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from gmeta.layers.exchange.recorded_lookups import RowGradients
from gmeta.models.training.optimizer.packed_gradients import Gradient


class StepGradients(NamedTuple):
    """The loss and gradients of one batch.

    Attributes:
      loss: () the loss, a mean over the batch's samples.
      samples: () the number of samples.
      dense: For each trainable variable its gradient, or None.
      rows: The gradients of rows that ``lookups.by_table`` takes.
      lookups: The lookups of the forward pass.
      logs: Name -> value of what the step reports.
    """

    loss: tf.Tensor
    samples: tf.Tensor
    dense: Sequence[Gradient]
    rows: Sequence[Gradient]
    lookups: RowGradients
    logs: dict[str, tf.Tensor]
