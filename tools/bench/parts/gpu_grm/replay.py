"""One rank that replays the batches of many: how long each of theirs computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from gmeta.io import SequenceCost
from numpy.typing import ArrayLike
from parts.gpu_grm.data import Users, lengths_of
from parts.gpu_grm.in_rank import Limit, run
from parts.gpu_grm.model import new_model
from parts.grm_throughput import dataset

WARM_UP = 3


def spread(seconds: ArrayLike, ranks: int) -> dict[str, float]:
    """What steps of so many ranks are like, of which the slowest keeps the others waiting.

    Args:
      seconds: (steps, R) of each rank's batch. R ranks are R // ranks jobs of so many.
      ranks: Of a job.

    Returns:
      ``uneven``, the slowest over the mean, averaged over steps; ``slowest`` and ``fastest`` seconds.
    """
    steps = np.asarray(seconds, np.float64)
    jobs = steps.shape[1] // ranks
    steps = steps[:, : jobs * ranks].reshape(-1, ranks)
    most = steps.max(axis=1)
    return {
        "uneven": float((most / steps.mean(axis=1)).mean()),
        "slowest": float(most.mean()),
        "fastest": float(steps.min(axis=1).mean()),
    }


def measure(settings: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Time the batch of each rank, step by step, each way in turn.

    Each batch is learned twice, and the second time counts: rows are there then, and nothing is new to the
    allocator of memory.
    """
    users = Users(0, settings["exposures"], settings["pool"], settings["most"])
    cost = SequenceCost.of_hstu(settings["dim"], settings["blocks"])
    of_ranks = [lengths_of(rank, settings, cost) for rank in range(settings["replay"])]
    spec = dataset([users.batch(of_ranks[0]["fixed"][0])]).element_spec
    model = new_model(settings, merge=True, dedup=True, depth=0)
    model.make_train_function()
    step = tf.function(model.train_step, input_signature=[spec])

    def seconds_of(lengths: Any) -> float:
        batch = users.batch(lengths)
        for _ in range(2):
            start = time.perf_counter()
            float(step(batch)["loss"])
            took = time.perf_counter() - start
        return took

    largest = max((one for own in of_ranks for one in own["fixed"]), key=lambda one: int(one.sum()))
    for lengths in [largest] * WARM_UP:
        seconds_of(lengths)
    found: dict[str, list[list[float]]] = {way: [] for way in of_ranks[0]}
    limit = Limit(settings["seconds"])
    for number in range(settings["batches"]):
        times = {way: [0.0] * settings["replay"] for way in found}
        for rank, own in enumerate(of_ranks):
            for way in found:
                times[way][rank] = seconds_of(own[way][number])
        for way, of_step in times.items():
            found[way].append(of_step)
        note(found)
        if limit.is_over():
            break


if __name__ == "__main__":
    run(measure)
