"""One rank of the ablation: trains the model in each requested way in turn, epoch by epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gmeta.core import collectives

import numpy as np
import tensorflow as tf
from gpu_hstu import matmul_rate
from parts.gpu_grm.data import Users, lengths_of
from parts.gpu_grm.in_rank import Limit, Peaks, run
from parts.gpu_grm.model import new_model
from parts.gpu_grm.operations import operations
from parts.grm_throughput import dataset
from parts.meta.rank import Pace

WAYS: dict[str, dict[str, Any]] = {
    "separate": {"merge": False, "dedup": False, "batches": "fixed", "ahead": False},
    "merged": {"merge": True, "dedup": False, "batches": "fixed", "ahead": False},
    "dedup": {"merge": True, "dedup": True, "batches": "fixed", "ahead": False},
    "balanced": {"merge": True, "dedup": True, "batches": "balanced", "ahead": False},
    "pipeline": {"merge": True, "dedup": True, "batches": "balanced", "ahead": True},
}
"""Each adds one thing to the previous one."""

EPOCHS = 3
"""The epochs of one call of `fit`."""


def epoch_data(batches: list[Any]) -> tf.data.Dataset:
    """This rank's own batches, in memory after the first epoch."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = dataset(batches).apply(tf.data.experimental.assert_cardinality(len(batches)))
    return data.prefetch(2).with_options(options)


def measure(settings: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Train each way for `EPOCHS` epochs, repeatedly; the first time traces, and isn't timed.

    Nor is the first epoch of each call, in which ranks wait for the last one to receive rank 0's weights.
    """
    rank, ways = collectives.world().rank, {way: WAYS[way] for way in settings["ways"]}
    users = Users(rank, settings["exposures"], settings["pool"], settings["most"])
    drawn = lengths_of(rank, settings)
    data = {way: epoch_data([users.batch(one) for one in of]) for way, of in drawn.items()}
    work = {
        way: [int(sum(one.sum() for one in of)), sum(operations(settings, one) for one in of)]
        for way, of in drawn.items()
    }
    tokens, needed = np.sum(
        collectives.allgather_objects([[work[own["batches"]][i] for own in ways.values()] for i in (0, 1)]),
        axis=0,
    ).tolist()
    found: dict[str, Any] = {
        "tables": os.environ.get("GMETA_TABLE_DEVICE", "cpu"),
        "tokens": dict(zip(ways, tokens, strict=True)),
        "operations": dict(zip(ways, needed, strict=True)),
        "loss": {},
        "seconds": {},
    }
    trainings, peaks = {}, Peaks()
    found["peak"] = peaks.bytes
    for way, own in ways.items():
        depth = settings["depth"] if own["ahead"] else 0
        model, pace = new_model(settings, merge=own["merge"], dedup=own["dedup"], depth=depth), Pace()
        fit = partial(model.fit, data[own["batches"]], epochs=EPOCHS, callbacks=[pace], verbose=0)
        trainings[way] = fit, pace
    for fit, _ in trainings.values():
        fit()  # traces
    found["rate"] = matmul_rate(settings["matmul"])
    limit = Limit(settings["seconds"])
    for _ in range(settings["rounds"]):
        for way, (fit, pace) in trainings.items():
            found["loss"][way] = peaks.run(way, fit).history["loss"][-1]
            by_rank = collectives.allgather_objects(pace.seconds[1 - EPOCHS :])
            found["seconds"].setdefault(way, []).extend(np.max(by_rank, axis=0).tolist())
        note(found)
        if limit.is_over():
            break


if __name__ == "__main__":
    run(measure)
