"""One rank of the lanes' benchmark: the same collectives through a lane and through Horovod, in turn.

Tensors are on GPUs where each rank has one and NCCL, else in host memory. The lane of host memory is measured
in both cases; with GPUs, this includes the copies that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import gmeta
from gmeta.core import collectives
from gmeta.core.collectives.lane import DEVICES, LaneDevice, lane_kind

import tensorflow as tf
from harness import WARM_UP
from parts.exchange.rank import slowest, timed
from parts.jobs import job_arguments

FEW = 1 << 16
CHAIN = 10
"""Collectives of at most `FEW` bytes in a function, one after another: calling a function takes as long."""

Way = Callable[[tf.Tensor, int], tf.Tensor]
"""A collective of a tensor, of which each rank gets the given number of rows."""


def exchange(place: LaneDevice) -> Way:
    """Send equal parts to all ranks, through the lane of a place."""

    def run(buffer: tf.Tensor, share: int) -> tf.Tensor:
        splits = tf.constant([share] * collectives.world().size)
        return collectives.alltoall(buffer, splits, name="wire", place=place, received_splits=splits)[0]

    return run


def exchange_by_horovod(buffer: tf.Tensor, share: int) -> tf.Tensor:
    """The same through Horovod, where the buffer is."""
    splits = tf.constant([share] * collectives.world().size)
    return collectives.import_horovod().alltoall(buffer, splits=splits)[0]


def add_up(place: LaneDevice) -> Way:
    """Sum a tensor, through the lane of a place."""
    return lambda buffer, _: collectives.allreduce_sum([buffer], name="sum", place=place)[0]


def add_up_by_horovod(buffer: tf.Tensor, share: int) -> tf.Tensor:
    """The same through Horovod, where the buffer is."""
    hvd = collectives.import_horovod()
    return hvd.allreduce(buffer, op=hvd.Sum)


def chain(way: Way, device: str, size: int, length: int) -> Callable[[], None]:
    """Run several collectives in one function, one after another."""
    share = size // 4 // collectives.world().size
    with tf.device(device):
        start = tf.zeros([share * collectives.world().size])

    @tf.function(input_signature=[tf.TensorSpec(start.shape)])
    def run(buffer: tf.Tensor) -> tf.Tensor:
        with tf.device(device):
            for _ in range(length):
                buffer = tf.ensure_shape(way(buffer, share), start.shape)
            return buffer[:1]

    return lambda: run(start).numpy()


def beside(ways: dict[str, Way], device: str, size: int, rounds: int) -> dict[str, float]:
    """Median seconds of a collective by each way, of tensors on a device."""
    length = CHAIN if size <= FEW else 1
    runs = {name: chain(way, device, size, length) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_UP + rounds):
        for name, run in runs.items():
            seconds[name].append(timed(lambda run=run: [run() for _ in range(3)]) / 3 / length)
    return {name: slowest(times[WARM_UP:]) for name, times in seconds.items()}


def main() -> None:
    """Measure each collective at each size; rank 0 writes it."""
    out, settings = job_arguments()
    gmeta.init()
    found = {}
    kinds = (("alltoall", exchange, exchange_by_horovod), ("allreduce", add_up, add_up_by_horovod))
    place: LaneDevice = "gpu" if lane_kind("gpu") == "nccl" else "cpu"
    for name, through, by_horovod in kinds:
        for size_name, size in settings["sizes"].items():
            ways: dict[str, Way] = {"tcp": through("cpu"), "horovod": by_horovod}
            if place == "gpu":
                ways["nccl"] = through("gpu")
            found[f"{name}{size_name}"] = beside(ways, DEVICES[place], size, settings["rounds"])
    if collectives.world().rank == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
