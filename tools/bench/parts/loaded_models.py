"""A server of several SavedModels for `row_dtypes.py`, in a session of stock TensorFlow each.

It loads the folders, asks each for rows in turn, and prints as JSON: the memory that the last one took when
it was loaded, and the median milliseconds of a request to each.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def load(folder: str) -> Callable[[np.ndarray], object]:
    """Load a model; return the function that asks it for ids."""
    session = tf.compat.v1.Session(graph=tf.Graph())
    with session.graph.as_default():
        signature = tf.compat.v1.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
    ids = signature.inputs["id"].name
    fetch = [tensor.name for tensor in signature.outputs.values()]
    return lambda asked: session.run(fetch, {ids: asked})


def main(rows: int, asked: int, rounds: int, folders: list[str]) -> None:
    """Load, ask and print."""
    random = np.random.default_rng(1)
    models = {}
    for folder in folders:
        before = resident()
        models[folder] = load(folder)
        models[folder](random.integers(0, rows, asked))
        taken = resident() - before
    times: dict[str, list[float]] = {folder: [] for folder in folders}
    for number in range(rounds + 20):
        ids = random.integers(0, rows, asked)
        for folder, ask in models.items():
            start = time.perf_counter()
            ask(ids)
            if number >= 20:
                times[folder].append(1e3 * (time.perf_counter() - start))
    medians = {folder: statistics.median(found) if found else 0.0 for folder, found in times.items()}
    print(json.dumps({"memory": taken, "ms": medians}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
