"""One rank of the benchmark of balanced steps: times its steps in every way, and writes what it found."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import gmeta
from gmeta.core import collectives
from gmeta.io import SequenceCost
from gmeta.io.rank_balance import balance_over_ranks, balanced_elements

import numpy as np
import tensorflow as tf
from parts.balance_lengths import Lengths, balanced, lengths
from parts.jobs import job_arguments

WARM_UP = 2
SPEC = {
    "task": tf.TensorSpec([None], tf.int64),
    "batch_id": tf.TensorSpec([None], tf.int64),
    "row_splits": tf.TensorSpec([None], tf.int64),
    "columns": {
        "item": tf.TensorSpec([None], tf.int64),
        "action": tf.TensorSpec([None], tf.int64),
        "time": tf.TensorSpec([None], tf.float32),
    },
}


def element(batch: Lengths) -> dict[str, Any]:
    """Sequences of these lengths, as `group_batch` reads them: a group a sequence, a row a token."""
    rows = int(batch.sum())
    return {
        "task": tf.range(len(batch), dtype=tf.int64),
        "batch_id": tf.zeros(len(batch), tf.int64),
        "row_splits": tf.constant(np.concatenate([[0], np.cumsum(batch)])),
        "columns": {
            "item": tf.range(rows, dtype=tf.int64),
            "action": tf.zeros(rows, tf.int64),
            "time": tf.zeros(rows),
        },
    }


def cut(dim: int, batch: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Way -> this rank's elements."""
    cost, own = SequenceCost.of_hstu(dim), None
    means: dict[SequenceCost, list[float]] = {cost: [], SequenceCost(): []}
    for rank in range(collectives.world().size):  # all ranks' lengths, as the target is of all
        drawn = lengths(np.random.default_rng([1, rank]), batch * (steps + 10))
        for by, found in means.items():
            found.append(float(by.of(drawn).mean()))
        own = drawn if rank == collectives.world().rank else own
    assert own is not None
    fixed = list(own[: steps * batch].reshape(steps, batch))
    targets = {by: float(np.mean(found)) * batch for by, found in means.items()}
    batches = {
        "fixed": fixed,
        "alg1_tokens": balanced(own, SequenceCost(), targets[SequenceCost()], steps),
        "alg1_flops": balanced(own, cost, targets[cost], steps),
        "kk": fixed,
        "kk_ahead": fixed,
    }
    return {way: [element(one) for one in ones] for way, ones in batches.items()}


def measure(dim: int, batch: int, steps: int, compute: float) -> dict[str, float]:
    """Way -> median milliseconds of a step, in which a batch of mean cost computes for so many seconds."""
    cost = SequenceCost.of_hstu(dim)
    drawn = lengths(np.random.default_rng(0), 100_000)
    seconds_of = compute / (float(cost.of(drawn).mean()) * batch)
    weights = tf.ones([1000])

    @tf.function(input_signature=[SPEC], autograph=False)
    def deal(groups: dict[str, Any]) -> dict[str, Any]:
        return balance_over_ranks(groups, cost)

    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)
    def reduce(gradient: tf.Tensor) -> tf.Tensor:
        return collectives.allreduce_sum([gradient], name="dense")[0]

    elements = cut(dim, batch, WARM_UP + steps)
    own = elements["kk_ahead"]
    ahead = balanced_elements(
        tf.data.Dataset.from_generator(lambda: iter(own), output_signature=SPEC), cost, name="ahead"
    )
    seconds: dict[str, list[float]] = {way: [] for way in (*elements, "kk_exchange")}
    for step in range(WARM_UP + steps):
        for way, ones in elements.items():
            collectives.barrier()
            start = time.perf_counter()
            groups = ones[step]
            if way == "kk":
                groups = deal(groups)
                groups["row_splits"].numpy()
                seconds["kk_exchange"].append(time.perf_counter() - start)
            if way == "kk_ahead":
                groups = next(ahead)
            splits = groups["row_splits"].numpy()
            time.sleep(float(cost.of(np.diff(splits)).sum()) * seconds_of)
            reduce(weights).numpy()  # where ranks wait for each other
            seconds[way].append(time.perf_counter() - start)
    by_rank = collectives.allgather_objects({way: times[WARM_UP:] for way, times in seconds.items()})
    return {
        way: 1000 * statistics.median(max(times) for times in zip(*(r[way] for r in by_rank), strict=True))
        for way in seconds
    }


def main() -> None:
    out, settings = job_arguments()
    gmeta.init()
    found = measure(**settings)
    if collectives.world().rank == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
