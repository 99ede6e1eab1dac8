"""Keeps the times that a clock has read in a step, and tells the steps of a call apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gmeta.callbacks.step_records import PARTS, Mark, Span, Step
from gmeta.core.graph.step_marks import SpanKind
from gmeta.core.graph.variables import lift_variables

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
        """Return how many values there ever were, and the latest."""
        return self._count.read_value(), self._values.read_value()

    def take(self, count: int, values: Any) -> None:
        """Keep what is new among the latest values; nothing, if some of it was overwritten."""
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
    """Tell the steps of a call apart by their order, or where something isn't in each, by time."""
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
