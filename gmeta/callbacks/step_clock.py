"""Reads the time at which parts of a training step end, inside the step's own graph.

A profiler tells what kernels ran; this tells which of a step's few parts is worth a change.

A stamp waits for tensors, and nothing waits for a stamp, not even another one: whatever of a step overlaps
goes on doing so, and the clock shows when it was over. Each stamp writes into a variable of its own, which is
read between the steps.

A kernel on a GPU is only launched when TensorFlow's executor says that its op is done. So where there is a
GPU a stamp copies one number of each tensor to the host, which can't be had before the kernel has run, and
makes use of it, or TensorFlow would leave out a copy that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.callbacks.step_records import PARTS, Step
from gmeta.callbacks.step_stamps import BEGIN, STOP, Notes, Site, Stamp, steps_of
from gmeta.core.errors import ConfigError
from gmeta.core.graph.host_ops import out_of_turn
from gmeta.core.graph.step_marks import SpanKind


class StepClock:
    """Stamps the parts of a training step as it runs.

    While a step is traced under `gmeta.core.graph.step_marks.use_clock`, the model, the exchanges between
    ranks and the pipeline call it. `gmeta.callbacks.StepTimes` calls `start` before the step and `stop` after
    it, marks the end of "data", and takes the steps by `read`. A stamp is half a dozen ops of some
    microseconds, so a step that nobody measures has none.

    Args:
      now: Gives the time as a () float64 tensor, in seconds; `tf.timestamp` but in tests.
      room: How many values of a stamp are kept between two readings; later ones take the place of the first.

    Example:
      >>> clock = StepClock()
      >>> @tf.function
      ... def step(x):
      ...     with tf.control_dependencies([clock.start()]):
      ...         x = tf.identity(x)
      ...     clock.mark("data", x)
      ...     loss = tf.reduce_sum(x)
      ...     clock.mark("forward", loss)
      ...     clock.stop(loss)
      ...     return loss
      >>> loss = step(tf.ones([3]))
      >>> sorted(mark.part for mark in clock.read()[0].marks)
      ['data', 'forward']
    """

    # Not a Trackable on purpose: what is kept here belongs to no checkpoint.

    def __init__(self, now: Callable[[], tf.Tensor] = tf.timestamp, room: int = 64) -> None:
        self.now = now
        self._room = room
        self._probes = bool(tf.config.list_logical_devices("GPU"))
        self._traced: list[Site] = []
        self._noted: dict[tuple[int, str | SpanKind], Notes] = {}
        self._place = 0  # in an eager step: how many stamps there were since "data"
        self._reader: Any = None

    def start(self) -> tf.Tensor:
        """A call of one or more steps begins here: what was before it belongs to none of their parts.

        Returns:
          A number that is there when the clock runs; in a graph, what doesn't depend on it may begin before.
        """
        now = self._stamp(())
        with tf.control_dependencies([self._site(BEGIN).write(now, now)]), tf.device("CPU:0"):
            return tf.identity(now.time)

    def stop(self, *tensors: Any) -> None:
        """The call is over when these tensors are there."""
        now = self._stamp(tensors)
        self._site(STOP).write(now, now)

    def mark(self, part: str, *tensors: Any) -> None:
        """A part ends when these tensors are there.

        Args:
          part: One of `PARTS`; "data" is the first of each step.
          *tensors: What the part makes: tensors, ragged ones, `tf.IndexedSlices`, nests of them; None counts
            for nothing. Without any, the part ends with the ops that ``tf.control_dependencies`` around the
            call names.

        Raises:
          ConfigError: There is no such part.
        """
        if part not in PARTS:
            raise ConfigError(f"a step has the parts {', '.join(PARTS)}, got {part!r}")
        now = self._stamp(tensors)
        self._site(part).write(now, now)

    def begin(self, what: SpanKind, *tensors: Any) -> Callable[..., None]:
        """A span begins when these tensors are there; return a function that takes those it ends with."""
        site, begin = self._site(what), self._stamp(tensors)

        def end(*tensors: Any) -> None:
            site.write(begin, self._stamp(tensors))

        return end

    def read(self, first: int = 0) -> list[Step]:
        """Return the steps of a call, which was made since the last reading, and forget them.

        Args:
          first: The number of the first one.
        """
        traced = self._traced
        if self._reader is None or self._reader[0] != len(traced):
            sites = list(traced)
            self._reader = len(sites), tf.function(lambda: [site.peek() for site in sites], autograph=False)
        for site, (count, values) in zip(traced, self._reader[1]() if traced else [], strict=True):
            site.take(int(count), values.numpy())
        steps = list(steps_of([*traced, *self._noted.values()], first))
        self._noted.clear()
        return steps

    def _site(self, what: str | SpanKind) -> Site | Notes:
        if not tf.executing_eagerly():
            self._traced.append(Site(what, self._room))
            return self._traced[-1]
        self._place = 0 if what == "data" else self._place + 1
        return self._noted.setdefault((self._place, what), Notes(what))

    def _stamp(self, tensors: Any) -> Stamp:
        """Read the time when all tensors have their values."""
        flat = [part for part in tf.nest.flatten(tensors, expand_composites=True) if tf.is_tensor(part)]
        waited: list[Any] = [part.read_value() if isinstance(part, tf.Variable) else part for part in flat]
        witness = None
        if self._probes:
            numbers = [_one_number(tensor) for tensor in waited if _has_numbers(tensor)]
            with tf.device("CPU:0"):
                witness = tf.reduce_sum(tf.concat(numbers, axis=0)) if numbers else None
        with (
            tf.device("CPU:0"),
            tf.control_dependencies(waited if witness is None else [*waited, witness]),
            out_of_turn(),
        ):
            return Stamp(self.now(), witness)


def _has_numbers(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool


def _one_number(tensor: tf.Tensor) -> tf.Tensor:
    """(1,) float64 on the host, or (0,) of an empty tensor."""
    first = tf.reshape(tensor, [-1])[:1]  # on the tensor's own device, as no other is asked for
    with tf.device("CPU:0"):
        return tf.cast(tf.identity(first), tf.float64)
