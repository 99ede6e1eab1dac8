"""Measures every collective that training uses, and checks its results, for ``gmeta doctor --np``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from gmeta.core.collectives.lane import DEVICES, LaneDevice, describe_way, lane_kind
from gmeta.core.collectives.objects import allgather_objects, barrier, broadcast_object, broadcast_variables
from gmeta.core.collectives.place import world
from gmeta.core.collectives.tensors import allreduce_sum, alltoall
from gmeta.core.errors import CollectiveError

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
"""Bytes that each rank gives to a collective."""

_REPEATS = 7


@dataclass(frozen=True)
class Measurement:
    """One collective at one size.

    Attributes:
      collective: Its name in `gmeta.core.collectives`.
      place: Where its tensors are.
      bytes: How many bytes each rank passes to it.
      seconds: Median over 7 calls of the slowest rank's time.
    """

    collective: str
    place: LaneDevice
    bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each rank sends."""
        return self.bytes / self.seconds


@dataclass(frozen=True)
class Way:
    """How small tensors in one place are sent.

    Attributes:
      place: Where they are.
      lane: What carries them: ``tcp``, ``nccl`` or ``horovod``.
      way: How this rank reaches the others, in words.
      seconds: Median of an alltoall and of an allreduce of a kilobyte, one of `SIZES`.
    """

    place: LaneDevice
    lane: str
    way: str
    seconds: tuple[float, float]


def ways(found: list[Measurement]) -> list[Way]:
    """Return for each measured place how its tensors are sent."""
    small = {(one.place, one.collective): one.seconds for one in found if one.bytes == SIZES[0]}
    return [
        Way(
            place,
            lane_kind(place),
            describe_way(place),
            (small[place, "alltoall"], small[place, "allreduce_sum"]),
        )
        for place in DEVICES
        if (place, "alltoall") in small
    ]


def measure(sizes: tuple[int, ...] = SIZES) -> list[Measurement]:
    """Time each collective at each size; all ranks call this and get the same result.

    Raises:
      CollectiveError: A collective fails or returns wrong values; the message names it and this rank.
    """
    found = [_measure("barrier", "cpu", 0, barrier)]
    gpus = all(allgather_objects(bool(tf.config.get_visible_devices("GPU"))))
    places: tuple[LaneDevice, ...] = ("cpu", "gpu") if gpus else ("cpu",)
    for size in sizes:
        for place in places:
            found.append(_measure("alltoall", place, size, _alltoall(size, place)))
            found.append(_measure("allreduce_sum", place, size, _allreduce(size, place)))
        for name, make in (
            ("broadcast_variables", _broadcast_variables),
            ("allgather_objects", _allgather_objects),
            ("broadcast_object", _broadcast_object),
        ):
            found.append(_measure(name, "cpu", size, make(size)))
    return found


def _measure(name: str, place: LaneDevice, size: int, run: Callable[[], None]) -> Measurement:
    run()  # traces the function, and lets Horovod cache its response
    times = []
    for _ in range(_REPEATS):
        barrier()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    by_rank = allgather_objects(times)
    slowest = [max(calls) for calls in zip(*by_rank, strict=True)]
    return Measurement(name, place, size, statistics.median(slowest))


def _check(name: str, right: bool) -> None:
    if not right:
        here = world()
        raise CollectiveError(
            f"{name} returned wrong values to rank {here.rank} of {here.size}; rebuild Horovod "
            "(`gmeta doctor` shows how), and run this again with HOROVOD_CPU_OPERATIONS=gloo"
        )


def _alltoall(size: int, place: LaneDevice) -> Callable[[], None]:
    here = world()
    rows = max(1, size // 8 // here.size)
    with tf.device(DEVICES[place]):
        keys = tf.repeat(tf.range(here.size, dtype=tf.int64), rows) + here.rank
        expected = tf.identity(keys)
    with tf.device("CPU:0"):
        splits = tf.fill([here.size], rows)

    @tf.function
    def exchange(keys: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        return alltoall(keys, splits, name="probe", place=place, received_splits=splits)[0]

    return lambda: _check("alltoall", bool(tf.reduce_all(exchange(keys, splits) == expected)))


def _allreduce(size: int, place: LaneDevice) -> Callable[[], None]:
    here = world()
    with tf.device(DEVICES[place]):
        halves = [tf.fill([max(1, size // 8)], float(here.rank + part)) for part in (0, 1)]
    total = here.size * (here.size - 1) / 2

    @tf.function
    def reduce(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        sums = allreduce_sum([first, second], name="probe", place=place)
        return tf.reduce_all(sums[0] == total) & tf.reduce_all(sums[1] == total + here.size)

    return lambda: _check("allreduce_sum", bool(reduce(*halves)))


def _broadcast_variables(size: int) -> Callable[[], None]:
    variable = tf.Variable(tf.fill([size // 4], world().rank + 1.0))

    def run() -> None:
        broadcast_variables([variable])
        _check("broadcast_variables", bool(tf.reduce_all(variable == 1.0)))

    return run


def _allgather_objects(size: int) -> Callable[[], None]:
    here = world()
    sent, expected = bytes([here.rank % 256]) * size, [bytes([r % 256]) * size for r in range(here.size)]
    return lambda: _check("allgather_objects", allgather_objects(sent) == expected)


def _broadcast_object(size: int) -> Callable[[], None]:
    root = world().size - 1
    sent, expected = bytes([world().rank % 256]) * size, bytes([root % 256]) * size
    return lambda: _check("broadcast_object", broadcast_object(sent, root) == expected)
