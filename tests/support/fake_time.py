"""A time that only work advances, for tests of ops that read the time inside a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.layers.exchange.recorded_lookups import current_graph


class FakeTime:
    """A time that passes only while work is done.

    Work waits for the readings that were traced before it, so the time is exact on any machine. Other
    readings are only ordered by their own dependencies.

    Attributes:
      seconds: The time.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._read: dict[Any, list[tf.Tensor]] = {}

    def now(self) -> tf.Tensor:
        """Return the time, () float64."""
        time = tf.ensure_shape(tf.numpy_function(lambda: np.float64(self.seconds), [], tf.float64), [])
        self._read.setdefault(current_graph(), []).append(time)
        return time

    def work(self, x: tf.Tensor, seconds: float) -> tf.Tensor:
        """Return x, after this many seconds."""

        def move(x: Any) -> Any:
            self.seconds += seconds
            return x

        read = [] if tf.executing_eagerly() else self._read.get(current_graph(), [])
        with tf.control_dependencies(read):
            return tf.ensure_shape(tf.numpy_function(move, [x], x.dtype), x.shape)
