"""A server for `publish.py`: a session that answers requests while it applies deltas.

It prints seconds of each delta, and percentiles of a request's milliseconds, as JSON: alone, beside a thread
that keeps a core busy, and beside a delta. Each is the median of as many rounds as there are deltas, less
the first, by which TensorFlow optimizes the graph. The session reads deltas from files itself: a string that
Python passes to it would make requests wait for Python's lock, which servers don't have.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

LASTS = 0.5


def main(folder: str, rows: int, asked: int, deltas: list[str]) -> None:
    """Serve, and print what it took."""
    saved = saved_model_pb2.SavedModel.FromString(Path(folder, "saved_model.pb").read_bytes())
    (taken,) = saved.meta_graphs[0].signature_def["apply_delta"].inputs.values()
    session = tf.compat.v1.Session(graph=tf.Graph())
    with session.graph.as_default():
        path = tf.compat.v1.placeholder(tf.string, [])
        given = {taken.name: tf.io.read_file(path)}
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], folder, input_map=given)

    def signature(name: str, *feeds: object) -> Callable[..., object]:
        outputs = [tensor.name for tensor in loaded.signature_def[name].outputs.values()]
        return session.make_callable(outputs, [*feeds])

    ids = session.graph.get_tensor_by_name(loaded.signature_def["serving_default"].inputs["id"].name)
    request, apply = signature("serving_default", ids), signature("apply_delta", path)
    random = np.random.default_rng(1)

    def ask() -> float:
        some = random.integers(0, rows, asked)
        start = time.perf_counter()
        request(some)
        return 1e3 * (time.perf_counter() - start)

    def beside(work: Callable[[], object]) -> tuple[float, list[float]]:
        """Return the seconds of work in another thread, and the milliseconds of requests meanwhile."""
        took: list[float] = []

        def run() -> None:
            start = time.perf_counter()
            work()
            took.append(time.perf_counter() - start)

        thread = threading.Thread(target=run)
        thread.start()
        found = [ask()]
        while thread.is_alive():
            found.append(ask())
        return took[0], found

    block = bytes(1 << 20)

    def busy() -> None:
        until = time.perf_counter() + LASTS
        while time.perf_counter() < until:
            hashlib.sha256(block).digest()  # without Python's lock

    for _ in range(500):  # the first requests optimize the graph
        ask()
    first, *others = (lambda each=each: apply(each) for each in deltas)
    seconds = [beside(first)[0]]
    found: dict[str, list[list[float]]] = {"alone": [], "busy": [], "during": []}
    for each in others:
        found["alone"].append(beside(lambda: time.sleep(LASTS))[1])
        found["busy"].append(beside(busy)[1])
        took, requests = beside(each)
        seconds.append(took)
        found["during"].append(requests)
    percentiles = {
        what: {str(each): float(np.median([np.percentile(one, each) for one in some])) for each in (50, 99)}
        for what, some in found.items()
    }
    print(json.dumps({"first": seconds[0], "apply": seconds[1:], **percentiles}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
