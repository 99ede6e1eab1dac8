"""Where the time of a training step goes: its parts, measured inside the step's own graph.

A profiler tells what kernels ran; this tells which of a step's few parts is worth a change. The parts follow
each other by their data: rows can't be looked up before the batch is there, and tasks can't adapt before they
have rows. So a part ends when the tensors it makes are there, and begins when the part before it has ended.

A mark waits for tensors, and nothing waits for a mark: whatever of a step overlaps goes on doing so, and
the clock shows when it was over. Marks wait for each other alone, through the variables that they write.

A kernel on a GPU is only launched when TensorFlow's executor says that its op is done. So where there is a
GPU a mark copies one number of each tensor to the host, which can't be had before the kernel has run, and
makes use of it, or TensorFlow would leave out a copy that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError

PARTS = ("data", "lookup", "inner", "outer", "update")
"""A step's parts, in the order of their ends: the batch is read, its rows are there, the tasks have adapted,
the outer gradients are there, and tables and dense weights have stepped."""


@dataclass(frozen=True)
class StepSeconds:
    """A reading of `StepClock`, or of several: they can be added up.

    Attributes:
      seconds: Part -> the seconds spent in it, in all steps together.
      steps: How many steps those are.
    """

    seconds: dict[str, float]
    steps: float = 0

    def __add__(self, other: StepSeconds) -> StepSeconds:
        both = {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in PARTS}
        return StepSeconds(both, self.steps + other.steps)

    @property
    def total(self) -> float:
        """The seconds of all parts."""
        return sum(self.seconds.values())

    @property
    def slowest(self) -> str:
        """The part that most of the time was spent in."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def share(self, part: str) -> float:
        """Return a part's share of all time, 0 to 1."""
        return self.seconds[part] / self.total if self.total else 0.0

    def milliseconds(self, part: str) -> float:
        """What a part takes in one step."""
        return 1e3 * self.seconds[part] / self.steps if self.steps else 0.0


class StepClock:
    """Adds up the seconds of a training step's parts, in variables, as the step runs.

    A model that has one calls `mark` as it traces its step; `gmeta.callbacks.StepTimes` gives it one, and
    calls `start` before the step and `stop` after it. A mark is half a dozen ops of some microseconds, so a
    step that nobody measures has none.

    Args:
      now: Gives the time as a () float64 tensor, in seconds; `tf.timestamp` but in tests.

    Example:
      >>> clock = StepClock()
      >>> @tf.function
      ... def step(x):
      ...     with tf.control_dependencies([clock.start()]):
      ...         rows = tf.gather(x, [0, 1])
      ...     clock.mark("lookup", rows)
      ...     total = tf.reduce_sum(rows)
      ...     clock.mark("outer", total)
      ...     return total
      >>> total = step(tf.ones([3]))
      >>> clock.read().steps
      1.0
    """

    # Not a Trackable on purpose: what is kept here belongs to no checkpoint.

    def __init__(self, now: Callable[[], tf.Tensor] = tf.timestamp) -> None:
        self._now = now
        self._probes = bool(tf.config.list_logical_devices("GPU"))
        with tf.init_scope(), tf.device("CPU:0"):
            self._last = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="step_clock/last")
            self._seen = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="step_clock/seen")
            # Of each part the seconds, and how often they were added to.
            self._sums = {
                name: tf.Variable(tf.zeros([2], tf.float64), trainable=False, name=f"step_clock/{name}")
                for name in PARTS
            }

    def start(self) -> tf.Tensor:
        """A step begins here: what was before it belongs to none of its parts.

        Returns:
          A number that is there when the clock runs; in a graph, what doesn't depend on it may begin before.
        """
        with tf.device("CPU:0"):
            return tf.identity(self._last.assign(self._now(), read_value=True))

    def mark(self, name: str, *tensors: Any) -> None:
        """The part ``name`` ends when these tensors are there.

        Args:
          name: One of `PARTS`. The time since `start`, or since the mark before this one, is added to it.
          *tensors: What the part makes: tensors, ragged ones, `tf.IndexedSlices`, nests of them; None counts
            for nothing. Without any, the part ends where the part before it did, or with the ops that
            ``tf.control_dependencies`` around the call names.

        Raises:
          ConfigError: There is no such part.
        """
        if name not in self._sums:
            raise ConfigError(f"a step has the parts {', '.join(PARTS)}, got {name!r}")
        self._end(name, tensors, steps=1)

    def stop(self, *tensors: Any) -> None:
        """The step is over when these tensors are there: what is left of its time is of its last part."""
        self._end(PARTS[-1], tensors, steps=0)

    def read(self) -> StepSeconds:
        """The sums since the beginning or the last `reset`."""
        values = {name: sums.numpy().tolist() for name, sums in self._sums.items()}
        steps = max(count for _, count in values.values())
        return StepSeconds({name: seconds for name, (seconds, _) in values.items()}, steps)

    def reset(self) -> None:
        """Set everything to zero."""
        for sums in self._sums.values():
            sums.assign(tf.zeros([2], tf.float64))

    def _end(self, name: str, tensors: Any, steps: float) -> None:
        flat = [part for part in tf.nest.flatten(tensors, expand_composites=True) if part is not None]
        arrivals = self._arrivals(flat)
        with tf.device("CPU:0"):
            last = self._last.read_value()  # after the mark before this one has written it
            with tf.control_dependencies([*arrivals, last]):
                now = self._now()
            passed = now - last
            self._sums[name].assign_add(tf.stack([passed, tf.constant(steps, tf.float64)]))
            self._last.assign(now)

    def _arrivals(self, tensors: list[tf.Tensor]) -> list[Any]:
        """What is there once all tensors have their values."""
        numbers = [_one_number(tensor) for tensor in tensors if self._probes and _has_numbers(tensor)]
        if not numbers:
            return tensors
        with tf.device("CPU:0"):
            return [*tensors, self._seen.assign(tf.reduce_sum(tf.concat(numbers, axis=0)), read_value=True)]


def _has_numbers(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool


def _one_number(tensor: tf.Tensor) -> tf.Tensor:
    """(1,) float64 on the host, or (0,) of an empty tensor."""
    first = tf.reshape(tensor, [-1])[:1]  # on the tensor's own device, as no other is asked for
    with tf.device("CPU:0"):
        return tf.cast(tf.identity(first), tf.float64)
