"""Reads the time at which parts of a training step end, inside the step's own graph.

A profiler shows which kernels ran; this clock shows which of a step's few parts is worth a change.

A stamp waits for tensors, and nothing waits for a stamp, not even another one: the overlapping parts of a
step still overlap, and the clock records when each ended. Each stamp writes into its own variable, which is
read between the steps.

On a GPU, TensorFlow's executor considers an op done when its kernel is launched. So if there is a GPU, a
stamp copies one number of each tensor to the host, which waits for the kernel, and uses the number, because
TensorFlow prunes a copy that isn't read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import lift_variables, out_of_turn
from gmeta.core.step import SpanKind

# The times of a training step: the ends of its parts, and the spans beside them.

PARTS = ("data", "lookup", "exchange", "wait", "forward", "inner", "backward", "outer", "update", "step")
"""A step's parts. The batch is read; its rows are looked up; keys, rows and gradients travel between ranks;
this rank waits for others that aren't ready to exchange; the loss is computed; tasks adapt; the gradients are
computed, and those of the outer loss, with this loss; tables and dense weights step. "step" is the whole step
of another library's model, which marks no parts."""


class Mark(NamedTuple):
    """The end of a part.

    Attributes:
      part: One of `PARTS`.
      time: In seconds.
    """

    part: str
    time: float


class Span(NamedTuple):
    """An activity that overlapped with parts of a step.

    Attributes:
      what: Its kind and name.
      begin: When the tensors that it begins with were computed, in seconds.
      end: When the tensors that it ends with were computed.
    """

    what: SpanKind
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """One measured step of one rank.

    Attributes:
      number: The batch's number since training began, from 0.
      begin: In seconds.
      end: When its last part, and all work that it had begun for later batches, was over.
      marks: The ends of its parts, in their order.
      spans: The activities that overlapped with its parts.
    """

    number: int
    begin: float
    end: float
    marks: tuple[Mark, ...] = ()
    spans: tuple[Span, ...] = ()

    def earlier(self, seconds: float) -> Step:
        """Return the same step, on a clock that is ``ahead`` seconds behind."""
        return replace(
            self,
            begin=self.begin - seconds,
            end=self.end - seconds,
            marks=tuple(Mark(part, time - seconds) for part, time in self.marks),
            spans=tuple(Span(what, begin - seconds, end - seconds) for what, begin, end in self.spans),
        )

    def to_list(self) -> list[Any]:
        """Return the numbers and texts from which `from_list` recreates the step on another rank."""
        spans = [
            [*(w.kind, w.name, w.lane, list(w.ranks), w.batches_ahead, w.beside), begin, end]
            for w, begin, end in self.spans
        ]
        return [self.number, self.begin, self.end, [list(mark) for mark in self.marks], spans]

    @classmethod
    def from_list(cls, told: list[Any]) -> Step:
        """Recreate the step from the result of `to_list`."""
        number, begin, end, marks, spans = told
        found = (
            Span(SpanKind(kind, name, lane, tuple(ranks), ahead, beside), first, last)
            for kind, name, lane, ranks, ahead, beside, first, last in spans
        )
        return cls(number, begin, end, tuple(Mark(*mark) for mark in marks), tuple(found))


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of steps' parts; several can be added up.

    Attributes:
      seconds: Part -> the seconds spent in it, in all steps together. Parts that steps don't have are left
        out.
      steps: The number of these steps.
      waits: For each rank, by number, the seconds in which it waited; () on one rank.
    """

    seconds: dict[str, float]
    steps: float = 0
    waits: tuple[float, ...] = field(default=())

    def __add__(self, other: StepSeconds) -> StepSeconds:
        both = {
            part: self.seconds.get(part, 0.0) + other.seconds.get(part, 0.0)
            for part in PARTS
            if part in self.seconds or part in other.seconds
        }
        ranks = max(len(self.waits), len(other.waits))
        padded = [(*each.waits, *[0.0] * (ranks - len(each.waits))) for each in (self, other)]
        return StepSeconds(both, self.steps + other.steps, tuple(map(sum, zip(*padded, strict=True))))

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
        """Return the milliseconds that a part takes in one step."""
        return 1e3 * self.seconds[part] / self.steps if self.steps else 0.0


# Keeps the times that a clock has read in a step, and separates the steps of a call.

BEGIN, STOP = "begin", "stop"
"""The places where the clock begins to run, and stops."""


class Stamp(NamedTuple):
    """A time, () float64, and the sum of the numbers that were fetched for it, if there were any."""

    time: tf.Tensor
    witness: tf.Tensor | None


class Site:
    """A place of a step where the time is read, and its latest values."""

    def __init__(self, what: str | SpanKind, room: int) -> None:
        self.what = what
        self.times = np.zeros([0, 2])  # (values, 2): those of the last reading, from when to when
        self._room, self._taken = room, 0
        with lift_variables(), tf.device("CPU:0"):
            self._values = tf.Variable(
                tf.zeros([room, 3], tf.float64), trainable=False, name="step_clock/times"
            )
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="step_clock/count")

    def write(self, begin: Stamp, end: Stamp) -> tf.Tensor:
        """Add a value."""
        with tf.device("CPU:0"):
            witnesses = [each for each in (begin.witness, end.witness) if each is not None]
            witness = tf.add_n(witnesses) if witnesses else tf.constant(0.0, tf.float64)
            place = self._count.read_value()
            row = tf.stack([begin.time, end.time, witness])[tf.newaxis]
            with tf.control_dependencies([self._values.scatter_nd_update([[place % self._room]], row)]):
                return self._count.assign(place + 1, read_value=True)

    def peek(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the number of all values so far, and the latest ones."""
        return self._count.read_value(), self._values.read_value()

    def take(self, count: int, values: Any) -> None:
        """Keep the new ones among the latest values; none, if some of them were overwritten."""
        new = range(self._taken, count)
        self._taken = count
        lost = len(new) > self._room
        self.times = values[[] if lost else [place % self._room for place in new], :2]


class Notes:
    """A place of an eager step where the time is read, and its values since the last reading."""

    def __init__(self, what: str | SpanKind) -> None:
        self.what = what
        self.times = np.zeros([0, 2])

    def write(self, begin: Stamp, end: Stamp) -> tf.Tensor:
        """Add a value."""
        self.times = np.append(self.times, [[float(begin.time), float(end.time)]], axis=0)
        return end.time


def steps_of(sites: Sequence[Site | Notes], number: int) -> Iterator[Step]:
    """Assign values to the steps of a call by their order or, if not every step has one, by time."""
    begins, stops, data = (
        [each for site in sites if site.what == name for each in site.times[:, 1].tolist()]
        for name in (BEGIN, STOP, "data")
    )
    count = len(data)
    if not (begins and stops and data):
        return
    begin, stop = begins[-1], stops[-1]
    marks: list[list[tuple[float, int, Mark]]] = [[] for _ in range(count)]
    spans: list[tuple[int | None, Span]] = []
    for order, site in enumerate(sites):
        each = len(site.times) // count if len(site.times) % count == 0 else 0
        for place, (first, last) in enumerate(site.times.tolist()):
            turn = place // each if each else None
            if isinstance(site.what, SpanKind):
                # On a busy machine what begins it may be noted after it has ended.
                spans.append((turn, Span(site.what, min(first, last), last)))
            elif site.what in PARTS and turn is not None:
                rank = order + len(sites) * (place % each)
                marks[turn].append((last, rank, Mark(site.what, last)))
    ends = [max((mark.time for *_, mark in found), default=begin) for found in marks[:-1]]
    bounds = [begin, *ends, stop]
    for turn, found in enumerate(marks):
        first, last = bounds[turn], max(bounds[turn], bounds[turn + 1])
        own = [
            span
            for place, span in spans
            if (place == turn if place is not None else first <= span.begin < last)
        ]
        own.sort(key=lambda span: (span.end, span.begin))
        yield Step(number + turn, first, last, tuple(mark for *_, mark in sorted(found)), tuple(own))


class StepClock:
    """Stamps the parts of a training step as it runs.

    While a step is traced under `gmeta.core.step.use_clock`, the model, the exchanges between
    ranks and the pipeline call it. `gmeta.callbacks.StepTimes` calls `start` before the step and `stop` after
    it, marks the end of "data", and takes the steps by `read`. A stamp is half a dozen ops of some
    microseconds, so steps that aren't measured have none.

    Args:
      now: Returns the time as a () float64 tensor, in seconds; `tf.timestamp` except in tests.
      room: How many values of a stamp are kept between two readings; later ones overwrite the first.

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

    # Not a Trackable on purpose: this state belongs in no checkpoint.

    def __init__(self, now: Callable[[], tf.Tensor] = tf.timestamp, room: int = 64) -> None:
        self.now = now
        self._room = room
        self._probes = bool(tf.config.list_logical_devices("GPU"))
        self._traced: list[Site] = []
        self._noted: dict[tuple[int, str | SpanKind], Notes] = {}
        self._place = 0  # in an eager step: how many stamps there were since "data"
        self._reader: Any = None

    def start(self) -> tf.Tensor:
        """Begin a call of one or more steps: work before it belongs to none of their parts.

        Returns:
          A number that is computed when the clock runs; in a graph, other ops may run before.
        """
        now = self._stamp(())
        with tf.control_dependencies([self._site(BEGIN).write(now, now)]), tf.device("CPU:0"):
            return tf.identity(now.time)

    def stop(self, *tensors: Any) -> None:
        """End the call when these tensors are computed."""
        now = self._stamp(tensors)
        self._site(STOP).write(now, now)

    def mark(self, part: str, *tensors: Any) -> None:
        """End a part when these tensors are computed.

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
        """Begin a span when these tensors are computed; return a function of the tensors that end it."""
        site, begin = self._site(what), self._stamp(tensors)

        def end(*tensors: Any) -> None:
            site.write(begin, self._stamp(tensors))

        return end

    def read(self, first: int = 0) -> list[Step]:
        """Return the steps of the call since the last reading, and forget them.

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
    first = tf.reshape(tensor, [-1])[:1]  # on the tensor's own device, as no other is requested
    with tf.device("CPU:0"):
        return tf.cast(tf.identity(first), tf.float64)
