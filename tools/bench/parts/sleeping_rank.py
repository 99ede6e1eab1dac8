"""One rank of the check of the pipeline's model: steps whose exchanges are real and whose computation sleeps.

So ranks hardly use a core, and any number of them run on one machine, each with its own wire.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import gmeta
from gmeta.core import collectives

import numpy as np
import tensorflow as tf
from parts.jobs import job_arguments


def make_step(micro: int, seconds: float) -> Any:
    """Return a function that makes a step of several micro-batches, with a given total computation.

    Rows of a micro-batch travel while the previous one computes, and its gradients while the next one does.
    """

    def sleep(token: Any) -> Any:
        time.sleep(seconds / micro)
        return np.float32(token)

    def send(name: str, numbers: tf.Tensor, splits: tf.Tensor, after: list[tf.Tensor]) -> tf.Tensor:
        with tf.control_dependencies(after):
            sent = tf.identity(numbers)
        came, _ = collectives.alltoall(sent, splits, name=f"{micro}/{name}", received_splits=splits)
        return came[0]

    @tf.function
    def step(numbers: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        rows = [send(f"rows{part}", numbers, splits, []) for part in range(min(2, micro))]
        computed = tf.constant(0.0)
        ends = []
        for part in range(micro):
            computed = tf.numpy_function(sleep, [computed + rows[part]], tf.float32, stateful=False)
            ends.append(send(f"gradients{part}", numbers, splits, [computed]))
            if part + 2 < micro:
                rows.append(send(f"rows{part + 2}", numbers, splits, []))
        return tf.add_n([computed, *ends])

    return step


def main() -> None:
    """Make steps with each number of micro-batches in turn; rank 0 writes median milliseconds."""
    out, settings = job_arguments()
    here = gmeta.init()
    steps = {micro: make_step(micro, settings["compute"]) for micro in settings["micro"]}
    paces: dict[int, list[float]] = {micro: [] for micro in steps}
    for number in range(settings["rounds"] + 2):
        for micro, step in steps.items():
            share = settings["bytes"] // (4 * micro * here.size)
            numbers, splits = tf.zeros([share * here.size]), tf.fill([here.size], share)
            start = time.perf_counter()
            step(numbers, splits).numpy()
            if number > 1:
                paces[micro].append(1e3 * (time.perf_counter() - start))
    if here.rank == 0:
        out.write_text(json.dumps({micro: statistics.median(each) for micro, each in paces.items()}))


if __name__ == "__main__":
    main()
