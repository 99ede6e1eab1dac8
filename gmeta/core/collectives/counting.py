"""Counts the executed collectives and the bytes that this rank gives to them.

A collective costs about a millisecond before a byte has moved, so their number determines a step's speed.
They are counted when they run in the graph, not when they are traced. A counter is a variable on the CPU, to
which each executed collective adds; nothing waits for it. A second variable counts the collectives that have
started: if the two differ, this rank is in a collective (`stalls`). The lane counts its own natively
(`add_counts`), because ten ops of counting would take longer than a small exchange. It counts objects as
all-to-alls, and `count_as` says what they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.graph import lift_variables

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
    before = {kind: _ended_well(kind) for kind in KINDS}
    yield counts
    for kind in KINDS:
        calls, size = (_ended_well(kind) - before[kind]).tolist()
        if calls:
            counts.calls[kind], counts.bytes[kind] = calls, size


def counter(kind: str) -> tf.Variable:
    """Return the variable that counts executed collectives and their bytes, int64 (2,)."""
    return _variable(f"gmeta/{kind}_count", [0, 0])


def starts(kind: str) -> tf.Variable:
    """Return the variable that counts started collectives, int64.

    It isn't part of `counter`, because then one collective would wait for the end of another.
    """
    return _variable(f"gmeta/{kind}_starts", 0)


def _variable(name: str, first: int | list[int]) -> tf.Variable:
    with _making:  # one for all threads: some of them count, and another compares the counts
        if name not in _variables:
            with lift_variables(), tf.device("CPU:0"):
                _variables[name] = tf.Variable(first, dtype=tf.int64, trainable=False, name=name)
        return _variables[name]


_variables: dict[str, tf.Variable] = {}
_making = threading.Lock()


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
    lane = _more_counts()
    open_ = {
        kind: int(starts(kind).numpy()) - int(counter(kind).numpy()[0]) + lane[kind].under_way
        for kind in KINDS
    }
    return {kind: number for kind, number in open_.items() if number > 0}


def forget_starts() -> None:
    """Forget the unfinished collectives: after a failure none is under way."""
    for kind in KINDS:
        starts(kind).assign(counter(kind)[0])


def count_finished() -> int:
    """Count all collectives that this rank has ended since the start."""
    return sum(int(_ended_well(kind)[0]) for kind in KINDS)


@dataclass(frozen=True)
class LaneCounts:
    """Collectives of one kind that the lane has counted.

    Attributes:
      under_way: How many have begun and not ended.
      calls: How many have ended well.
      bytes: Of this rank's input to these.
    """

    under_way: int = 0
    calls: int = 0
    bytes: int = 0


def add_counts(read: Callable[[], Mapping[str, LaneCounts]]) -> None:
    """Count what ``read`` returns too, by kind, from now on."""
    global _read
    _read = read


_read: Callable[[], Mapping[str, LaneCounts]] | None = None


def _more_counts() -> dict[str, LaneCounts]:
    found = {} if _read is None else _read()
    return {kind: found.get(kind, LaneCounts()) for kind in KINDS}


_renamed: dict[str, npt.NDArray[np.int64]] = {}
_renaming = threading.Lock()


def count_as(kind: str, size: int, away: int) -> None:
    """Count an all-to-all of a lane, which has ended and gave ``away`` bytes to others, as another kind.

    Args:
      kind: What it was for: ``allgather``, ``broadcast`` or ``barrier``.
      size: The bytes of this rank's input to that.
      away: The bytes that the lane has counted.
    """
    with _renaming:
        for name, change in ((kind, [1, size]), ("alltoall", [-1, -away])):
            _renamed[name] = _renamed.get(name, np.zeros(2, np.int64)) + change


def _ended_well(kind: str) -> npt.NDArray[np.int64]:
    """Collectives of a kind and their bytes."""
    with _renaming:
        lane, renamed = _more_counts()[kind], _renamed.get(kind, np.zeros(2, np.int64))
    return np.asarray(np.add(counter(kind).numpy(), [lane.calls, lane.bytes]) + renamed)


def leave_out_alltoall() -> None:
    """Leave an all-to-all of a lane, which has ended and sent nothing, out of the counts."""
    with _renaming:
        _renamed["alltoall"] = _renamed.get("alltoall", np.zeros(2, np.int64)) - [1, 0]


def count(kind: str, size: tf.Tensor | int, after: tf.Tensor) -> None:
    """Count one collective of `size` bytes once its result, `after`, is computed.

    The dependence also keeps a collective whose result isn't used from being pruned on this rank alone.
    """
    with tf.device("CPU:0"), tf.control_dependencies([after]):
        counter(kind).assign_add(tf.stack([tf.constant(1, tf.int64), tf.cast(size, tf.int64)]))
