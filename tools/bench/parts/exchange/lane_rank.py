"""One rank of the lane's benchmark: the same collectives through the lane and through Horovod, in turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import gmeta
import tensorflow as tf
from gmeta.core import collectives
from gmeta.core.collectives.lane import lane_kind
from harness import WARM_UP
from parts.exchange.rank import slowest, timed
from parts.jobs import job_arguments

FEW = 1 << 16
CHAIN = 10
"""Collectives of at most `FEW` bytes in a function, one after another: a call of a function takes as long."""

Make = Callable[[int], Callable[[tf.Tensor], tf.Tensor]]


def alltoall(chain: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Equal parts to all ranks, so many times."""
    here = collectives.world()

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def run(buffer: tf.Tensor) -> tf.Tensor:
        splits = tf.fill([here.size], tf.size(buffer) // here.size)
        for _ in range(chain):
            buffer, splits = collectives.alltoall(buffer, splits, name="wire")
        return tf.size(buffer)

    return run


def allreduce(chain: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """One tensor, so many times."""

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def run(buffer: tf.Tensor) -> tf.Tensor:
        for _ in range(chain):
            (buffer,) = collectives.allreduce_sum([buffer], name="sum")
        return tf.size(buffer)

    return run


def beside(make: Make, size: int, rounds: int) -> dict[str, float]:
    """Median seconds of a collective by both ways."""
    chain = CHAIN if size <= FEW else 1
    ways = {"tcp": make(chain)}
    ways["tcp"].get_concrete_function()
    with ThreadPoolExecutor(1) as other:  # what another thread traces goes through Horovod
        ways["horovod"] = make(chain)
        other.submit(ways["horovod"].get_concrete_function).result()
    ranks = collectives.world().size
    buffer = tf.zeros([size // 4 // ranks * ranks])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(WARM_UP + rounds):
        for way, run in ways.items():
            spent = timed(lambda run=run: [run(buffer).numpy() for _ in range(3)])
            seconds[way].append(spent / 3 / chain)
    return {way: slowest(times[WARM_UP:]) for way, times in seconds.items()}


def main() -> None:
    """Measure each collective at each size; rank 0 writes it."""
    out, settings = job_arguments()
    gmeta.init()
    found = {}
    if lane_kind() == "tcp":
        for name, make in (("alltoall", alltoall), ("allreduce", allreduce)):
            for size_name, size in settings["sizes"].items():
                found[f"{name}{size_name}"] = beside(make, size, settings["rounds"])
    if collectives.world().rank == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
