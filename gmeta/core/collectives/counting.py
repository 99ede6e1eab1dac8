"""Counts the executed collectives and the bytes that this rank gives to them.

A collective costs about a millisecond before a byte has moved, so their number determines a step's speed.
They are counted when they run in the graph, not when they are traced. A counter is a variable on the CPU, to
which each executed collective adds; nothing waits for it. A second variable counts the collectives that have
started: if the two differ, this rank is in a collective (`stalls`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import tensorflow as tf

from gmeta.core.graph.variables import lift_variables

KINDS = ("alltoall", "allreduce", "allgather", "broadcast", "barrier")


@dataclass
class CollectiveCounts:
    """The counts of `count_collectives`, which fills them when the ``with`` block ends.

    Attributes:
      calls: Executed collectives by kind: ``alltoall``, ``allreduce`` (a group is one), ``allgather``,
        ``broadcast``, ``barrier``. Kinds that didn't run are left out.
      bytes: By kind, the bytes of this rank's input; for an alltoall, only the bytes for other ranks.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of all executed collectives."""
        return sum(self.calls.values())


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count the collectives that are executed on this rank inside a ``with`` block.

    A job of one rank executes no collectives.

    Yields:
      The counts, which are zero until the block ends.

    Example:
      >>> with count_collectives() as counts:
      ...     exchanged, _ = alltoall(tf.constant([1, 2]), tf.constant([2]), name="keys")
      >>> counts.total
      0
    """
    counts = CollectiveCounts()
    before = {kind: counter(kind).numpy() for kind in KINDS}
    yield counts
    for kind in KINDS:
        calls, size = (counter(kind).numpy() - before[kind]).tolist()
        if calls:
            counts.calls[kind], counts.bytes[kind] = calls, size


@functools.cache
def counter(kind: str) -> tf.Variable:
    """Return the variable that counts executed collectives and their bytes, int64 (2,)."""
    with lift_variables(), tf.device("CPU:0"):
        return tf.Variable([0, 0], dtype=tf.int64, trainable=False, name=f"gmeta/{kind}_count")


@functools.cache
def starts(kind: str) -> tf.Variable:
    """Return the variable that counts started collectives, int64.

    It isn't part of `counter`, because then one collective would wait for the end of another.
    """
    with lift_variables(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name=f"gmeta/{kind}_starts")


def count_start(kind: str, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Count the start of a collective, then return its inputs.

    In a graph the inputs pass through placeholders with a default, whose value the graph optimizer can't
    know.
    """
    with tf.device("CPU:0"), tf.control_dependencies(inputs):
        start = starts(kind).assign_add(1, read_value=False)
    if tf.executing_eagerly():
        return list(inputs)
    with tf.control_dependencies([start]):
        return [tf.raw_ops.PlaceholderWithDefault(input=t, shape=t.shape) for t in inputs]


def waiting() -> dict[str, int]:
    """Count, by kind, the collectives that this rank has started and not yet ended; leave out zero counts."""
    open_ = {kind: int(starts(kind).numpy()) - int(counter(kind).numpy()[0]) for kind in KINDS}
    return {kind: number for kind, number in open_.items() if number > 0}


def forget_starts() -> None:
    """Forget the unfinished collectives: after a failure none is under way."""
    for kind in KINDS:
        starts(kind).assign(counter(kind)[0])


def count_finished() -> int:
    """Count all collectives that this rank has ended since the start."""
    return sum(int(counter(kind).numpy()[0]) for kind in KINDS)


def count(kind: str, size: tf.Tensor | int, after: tf.Tensor) -> None:
    """Count one collective of `size` bytes once its result, `after`, is computed.

    The dependence also keeps a collective whose result nobody reads from being pruned on this rank alone.
    """
    with tf.device("CPU:0"), tf.control_dependencies([after]):
        counter(kind).assign_add(tf.stack([tf.constant(1, tf.int64), tf.cast(size, tf.int64)]))
