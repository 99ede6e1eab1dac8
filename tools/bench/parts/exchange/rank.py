"""One rank of the exchange benchmark: times its steps beside the other ranks, and writes its results."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

import gmeta
from gmeta.core import collectives
from gmeta.ops.device import DeviceKind

import tensorflow as tf
from parts.exchange.ids import CRITEO, ZipfIds
from parts.exchange.steps import PER_FEATURE, WAYS, make_step
from parts.exchange.tfra_steps import make_tfra_step
from parts.jobs import job_arguments

VOCABULARIES = {"criteo": CRITEO, "million": (1_000_000,) * len(CRITEO), "tiny": (1000,) * 3}
WARM_UP = 2


def slowest(seconds: list[float]) -> float:
    """The median over rounds of the slowest rank's time."""
    by_rank = collectives.allgather_objects(seconds)
    return statistics.median(max(round_) for round_ in zip(*by_rank, strict=True))


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call that all ranks start together, including its work on a GPU."""
    collectives.barrier()
    start = time.perf_counter()
    run()
    tf.test.experimental.sync_devices()
    return time.perf_counter() - start


def ways(ids: str, dim: int, batch: int, rounds: int, device: DeviceKind) -> dict[str, dict[str, float]]:
    """Time and bytes of a step in every way, interleaved."""
    world = collectives.world()
    vocabularies = VOCABULARIES[ids]
    draw = ZipfIds(vocabularies, seed=100 + world.rank)
    batches = [[tf.constant(part) for part in draw.batch(batch)] for _ in range(WARM_UP + rounds)]
    steps = {way: make_step(way, dim, len(vocabularies), device) for way in (*WAYS, PER_FEATURE)}
    tfra = make_tfra_step(dim, len(vocabularies)) if world.size > 1 else None
    if tfra is not None:
        steps["tfra"] = tfra
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    found: dict[str, dict[str, float]] = {}
    for keys in batches:
        for way, step in steps.items():
            with collectives.count_collectives() as counts:
                seconds[way].append(timed(lambda step=step, keys=keys: step(keys).numpy()))
            found[way] = {
                "collectives": counts.calls.get("alltoall", 0),
                "bytes": counts.bytes.get("alltoall", 0),
            }
    for way, values in seconds.items():
        found[way]["seconds"] = slowest(values[WARM_UP:])
    return found


def wire(sizes: tuple[int, ...], rounds: int) -> list[tuple[int, float]]:
    """Bytes that a rank sends to others in one exchange -> its seconds."""
    world = collectives.world()
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32)])
    def exchange(buffer: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        return tf.size(collectives.alltoall(buffer, splits, name="wire")[0])

    for size in sizes:
        share = size // 4 // max(world.size - 1, 1)
        buffer, splits = tf.zeros([share * world.size]), tf.constant([share] * world.size)
        times = [timed(lambda b=buffer, s=splits: exchange(b, s).numpy()) for _ in range(WARM_UP + rounds)]
        found.append((share * 4 * (world.size - 1), slowest(times[WARM_UP:])))
    return found


def scaling(ids: str, dim: int, batch: int, compute: float, rounds: int, device: DeviceKind) -> float:
    """Seconds of a step with a sleep for the model's computation and an all-reduce of a million weights."""
    world = collectives.world()
    draw = ZipfIds(VOCABULARIES[ids], seed=200 + world.rank)
    step = make_step("both", dim, len(VOCABULARIES[ids]), device)
    dense = tf.ones([1_000_000])

    @tf.function
    def reduce(gradient: tf.Tensor) -> tf.Tensor:
        return collectives.allreduce_sum([gradient], name="dense")[0][0]

    times = []
    for _ in range(WARM_UP + rounds):
        keys = [tf.constant(part) for part in draw.batch(batch)]

        def run(keys: list[tf.Tensor] = keys) -> None:
            step(keys).numpy()
            time.sleep(compute)
            reduce(dense).numpy()

        times.append(timed(run))
    return slowest(times[WARM_UP:])


def take_cores(share: int) -> None:
    """Pin this rank to its own cores, if the machine has enough, so that others don't affect its pace."""
    cores = sorted(os.sched_getaffinity(0))
    first = int(os.environ["HOROVOD_LOCAL_RANK"]) * share
    if share and first + share <= len(cores):
        os.sched_setaffinity(0, cores[first : first + share])
        tf.config.threading.set_intra_op_parallelism_threads(share)


def main() -> None:
    """Measure what the arguments say; rank 0 writes it."""
    out, settings = job_arguments()
    # Before TensorFlow starts its threads; the world is known only after.
    os.environ.setdefault("HOROVOD_LOCAL_RANK", "0")
    take_cores(settings["cores_a_rank"])
    gmeta.init()
    rounds, batch, device = settings["rounds"], settings["batch"], settings["device"]
    found = {
        "ways": {
            f"{ids}/dim{dim}": ways(ids, dim, batch, rounds, device)
            for ids in settings["ids"]
            for dim in settings["dims"]
        },
        "wire": wire(tuple(settings["wire"]), rounds),
        "scaling": scaling(
            settings["ids"][0], settings["dims"][0], batch, settings["compute"], rounds, device
        ),
    }
    if collectives.world().rank == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
