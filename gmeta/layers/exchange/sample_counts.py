"""Counts the samples in all ranks' batches of a step, through the step's first key exchange.

Ranks take steps together. A rank whose data has ended takes steps without samples until all ranks' data has
ended. Detecting that moment needs no extra collective: each rank sends its number of samples with its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

_active: ContextVar[StepSamples | None] = ContextVar("step_samples", default=None)


class StepSamples:
    """The numbers of samples in a step.

    Attributes:
      own: () int64, this rank's number.
      everywhere: () int64, the sum over all ranks; None until a key exchange has delivered it.
      before_end: Tensors that a step which ends the data must wait for.
    """

    def __init__(self, own: tf.Tensor) -> None:
        with tf.device("CPU:0"):
            self.own = tf.cast(own, tf.int64)
        self.everywhere: tf.Tensor | None = None
        self.before_end: list[tf.Tensor] = []
        self._graph = current_graph()

    def hear(self, notes: tf.Tensor) -> None:
        """Read the ranks' numbers from an exchange's notes, (world size, 1) int64."""
        # A tensor made in a function within the step can't be used outside of that function.
        if self.everywhere is None and current_graph() is self._graph:
            with tf.device("CPU:0"):
                self.everywhere = tf.reduce_sum(notes[:, 0])


@contextmanager
def step_samples(own: tf.Tensor) -> Iterator[StepSamples]:
    """Let the lookups in the ``with`` block send this rank's number of samples to the other ranks."""
    samples = StepSamples(own)
    token = _active.set(samples)
    try:
        yield samples
    finally:
        _active.reset(token)


def active_step_samples() -> StepSamples | None:
    """Return what the innermost `step_samples` yielded, or None outside of any."""
    return _active.get()


def current_graph() -> Any:
    """Return the graph that is being traced; None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
