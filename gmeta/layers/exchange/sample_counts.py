"""How many samples the ranks' batches of a step have, which the step's first key exchange tells.

Ranks take steps together. A rank whose data has ended takes steps without samples until all have ended, and
that moment is found without a collective of its own: each rank's number of samples rides along with its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

_active: ContextVar[StepSamples | None] = ContextVar("step_samples", default=None)


class StepSamples:
    """The samples of a step.

    Attributes:
      own: () int64, of this rank.
      everywhere: () int64, of all ranks together; None until a key exchange has told it.
    """

    def __init__(self, own: tf.Tensor) -> None:
        with tf.device("CPU:0"):
            self.own = tf.cast(own, tf.int64)
        self.everywhere: tf.Tensor | None = None
        self._graph = current_graph()

    def hear(self, notes: tf.Tensor) -> None:
        """Take the ranks' numbers out of an exchange's notes, (world size, 1) int64."""
        # Out of a function within the step, tensors can't be had.
        if self.everywhere is None and current_graph() is self._graph:
            with tf.device("CPU:0"):
                self.everywhere = tf.reduce_sum(notes[:, 0])


@contextmanager
def step_samples(own: tf.Tensor) -> Iterator[StepSamples]:
    """Let the lookups in this block tell the other ranks that this rank's batch has so many samples."""
    samples = StepSamples(own)
    token = _active.set(samples)
    try:
        yield samples
    finally:
        _active.reset(token)


def active_step_samples() -> StepSamples | None:
    """What the innermost `step_samples` yielded, or None outside of any."""
    return _active.get()


def current_graph() -> Any:
    """The graph that is being traced; None where ops run at once."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
