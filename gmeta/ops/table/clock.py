"""The clock of a table whose rows have a lifetime in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.native import load_op_library
from gmeta.policies import TTL
from gmeta.policies.row_lifetimes import Eviction

_native = load_op_library("ops")
tf.no_gradient("GmetaNoteStepTime")

_MICROSECONDS = 1e6


class _StepTimes:
    """Steps and their times, (n, 2) int64. TensorFlow tracks no variable in it, so tables save it."""

    def __init__(self, lifetime: float, every: float) -> None:
        self.lifetime, self.every = (max(1, round(time * _MICROSECONDS)) for time in (lifetime, every))
        with tf.init_scope(), tf.device("CPU:0"):
            shape = tf.TensorShape([None, 2])
            self.pairs = tf.Variable(np.empty((0, 2), np.int64), trainable=False, shape=shape)

    def note(self, step: tf.Tensor, seconds: tf.Tensor) -> Any:
        return _native.gmeta_note_step_time(
            self.pairs.read_value(),
            step,
            tf.cast(seconds, tf.float64),
            lifetime=self.lifetime,
            every=self.every,
        )


class HasClock:
    """The part of a `gmeta.ops.HashTable` that evicts by a clock (`gmeta.policies.TTL` with ``seconds``).

    A record has the step of its last use, not the time. The table therefore notes at which times it came to
    its steps, in at most 67 pairs (``ops/table/core/step_times.h``). They are saved with the table.

    Attributes:
      clock: Function without arguments that returns the time in seconds, () float64. The default is the
        machine's time. Functions that are already traced keep the clock that they were traced with.
    """

    clock: Callable[[], tf.Tensor] = staticmethod(tf.timestamp)
    _times: _StepTimes | None = None

    def _start_clock(self, eviction: Eviction | None) -> None:
        if isinstance(eviction, TTL) and eviction.seconds is not None:
            self._times = _StepTimes(eviction.lifetime, eviction.interval)

    @property
    def step_times(self) -> tf.Tensor | None:
        """The noted steps and their times in microseconds, (n, 2) int64; None in a table without a clock."""
        return None if self._times is None else self._times.pairs.read_value()

    def set_step_times(self, pairs: npt.ArrayLike | tf.Tensor) -> None:
        """Replace `step_times` by saved ones; does nothing in a table without a clock.

        Without pairs, all rows count as used at the next update.
        """
        if self._times is not None:
            self._times.pairs.assign(np.reshape(np.asarray(pairs, np.int64), (-1, 2)))

    def _sweep(self: Any, updated: tf.Operation | None) -> tf.Operation | None:
        """Note the time of an update, and sweep the shards whose turn has come."""
        if self._times is None:
            return updated
        with tf.control_dependencies([] if updated is None else [updated]):
            noted, before, turns = self._note()
            kept = self._times.pairs.assign(noted, read_value=False)
            evicted = _native.gmeta_hash_table_evict(self.resource_handle, before, turns)
        return None if tf.executing_eagerly() else tf.group(kept, evicted)

    def _note(self: Any) -> Any:
        with tf.device("CPU:0"):
            return self._times.note(self.step(), self.clock())

    def _evict_all(self: Any) -> tf.Tensor:
        """Evict in all shards, as of now."""
        before = tf.constant(-1, tf.int64) if self._times is None else self._note()[1]
        return _native.gmeta_hash_table_evict(self.resource_handle, before, tf.constant(-1, tf.int64))
