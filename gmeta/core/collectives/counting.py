"""How many collectives were executed, and how many bytes this rank gave to them.

A collective costs about a millisecond before a byte has moved, so a step is as slow as their number. They are
counted as they run in the graph, not as they are traced. A counter is a variable on the CPU that the executed
collective adds to; nothing waits for it. Beside it another is added to when a collective starts: where they
differ, this rank is in one (`stalls`).
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
    """What `count_collectives` found. It is filled when the ``with`` block ends.

    Attributes:
      calls: Executed collectives by kind: ``alltoall``, ``allreduce`` (a group is one), ``allgather``,
        ``broadcast``, ``barrier``. Kinds that didn't run are left out.
      bytes: By kind, the bytes of this rank's input. Of an alltoall only what goes to other ranks.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All executed collectives."""
        return sum(self.calls.values())


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count the collectives that are executed on this rank inside a ``with`` block.

    One rank executes none.

    Yields:
      The counts; zero until the block ends.

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
    """Collectives executed so far and their bytes, int64 (2,)."""
    with lift_variables(), tf.device("CPU:0"):
        return tf.Variable([0, 0], dtype=tf.int64, trainable=False, name=f"gmeta/{kind}_count")


@functools.cache
def starts(kind: str) -> tf.Variable:
    """Collectives started so far, int64. Not part of `counter`: one would wait for the end of another."""
    with lift_variables(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name=f"gmeta/{kind}_starts")


def count_start(kind: str, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The inputs of a collective, once its start has been counted.

    In a graph they come through placeholders with a default, whose value the graph optimizer can't tell.
    """
    with tf.device("CPU:0"), tf.control_dependencies(inputs):
        start = starts(kind).assign_add(1, read_value=False)
    if tf.executing_eagerly():
        return list(inputs)
    with tf.control_dependencies([start]):
        return [tf.raw_ops.PlaceholderWithDefault(input=t, shape=t.shape) for t in inputs]


def waiting() -> dict[str, int]:
    """By kind, how many collectives this rank has started and not yet ended; without kinds of none."""
    open_ = {kind: int(starts(kind).numpy()) - int(counter(kind).numpy()[0]) for kind in KINDS}
    return {kind: number for kind, number in open_.items() if number > 0}


def forget_starts() -> None:
    """After a failure nothing is under way."""
    for kind in KINDS:
        starts(kind).assign(counter(kind)[0])


def count_finished() -> int:
    """All collectives that this rank has ended since the start."""
    return sum(int(counter(kind).numpy()[0]) for kind in KINDS)


def count(kind: str, size: tf.Tensor | int, after: tf.Tensor) -> None:
    """Count one collective of `size` bytes once `after`, its result, is there.

    The dependence also keeps a collective whose result nobody reads from being pruned on this rank alone.
    """
    with tf.device("CPU:0"), tf.control_dependencies([after]):
        counter(kind).assign_add(tf.stack([tf.constant(1, tf.int64), tf.cast(size, tf.int64)]))
