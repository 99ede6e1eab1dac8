"""One rank that replays the batches of many ranks, and times each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from gmeta.io import SequenceCost

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike
from parts.balance_lengths import Lengths
from parts.gpu_grm.calibration import calibration_batches, measured_cost, sums
from parts.gpu_grm.data import Users, draw, lengths_of
from parts.gpu_grm.in_rank import Limit, run
from parts.gpu_grm.model import new_model
from parts.grm_throughput import dataset

WARM_UP, REPEATS = 3, 3


def spread(seconds: ArrayLike, ranks: int) -> dict[str, float]:
    """Summarise steps of several ranks, in which the slowest keeps the others waiting.

    Args:
      seconds: (steps, R) of each rank's batch. R ranks are R // ranks jobs.
      ranks: The ranks of a job.

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

    A batch is trained on once before it is timed, so that its rows exist and memory is allocated.
    """
    users = Users(0, settings["exposures"], settings["pool"], settings["most"])
    spec = dataset([users.batch(draw([1, 0], 1, settings))]).element_spec
    model = new_model(settings, merge=True, dedup=True, depth=0)
    model.make_train_function()
    step = tf.function(model.train_step, input_signature=[spec])

    def seconds_of(lengths: Lengths, repeats: int = REPEATS) -> float:
        batch, took = users.batch(lengths), []
        for _ in range(1 + repeats):
            start = time.perf_counter()
            float(step(batch)["loss"])
            took.append(time.perf_counter() - start)
        return statistics.median(took[1:])

    varied, ranks = calibration_batches(settings), range(settings["replay"])
    fixed = [one for rank in ranks for one in lengths_of(rank, settings)["fixed"]]
    usual = [seconds_of(max([*varied, *fixed], key=lambda one: int(one.sum()))) for _ in range(WARM_UP)][-1]
    measured, fit = measured_cost(varied, seconds_of)
    costs = {"by_cost": SequenceCost.of_hstu(settings["dim"], settings["blocks"])}
    of_ranks = [
        lengths_of(rank, settings, costs | ({"measured": measured} if measured else {})) for rank in ranks
    ]
    ways = list(of_ranks[0])
    whole = usual * len(ways) * len(ranks) * (1 + REPEATS)  # of a step of all ranks, in each way
    repeats = REPEATS if whole <= settings["seconds"] else 1
    found: dict[str, Any] = {"fit": fit, "repeats": repeats, "seconds": {}, "sums": {}}
    limit = Limit(settings["seconds"])
    for number in range(settings["batches"]):
        times = [{way: seconds_of(own[way][number], repeats) for way in ways} for own in of_ranks]
        for way in ways:
            found["seconds"].setdefault(way, []).append([of_rank[way] for of_rank in times])
            found["sums"].setdefault(way, []).append([sums(own[way][number]) for own in of_ranks])
        note(found)
        if limit.is_over():
            break


if __name__ == "__main__":
    run(measure)
