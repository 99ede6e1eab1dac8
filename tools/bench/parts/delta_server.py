"""A server for `publish.py`: a session that answers requests while it applies deltas.

It prints seconds of each delta, and milliseconds of requests alone and meanwhile, as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import tensorflow as tf


def main(folder: str, rows: int, asked: int, deltas: list[str]) -> None:
    """Serve, and print what it took."""
    session = tf.compat.v1.Session(graph=tf.Graph())
    with session.graph.as_default():
        signatures = tf.compat.v1.saved_model.load(session, ["serve"], folder).signature_def

    def ask(name: str, **inputs: object) -> float:
        definition = signatures[name]
        feed = {definition.inputs[key].name: value for key, value in inputs.items()}
        fetch = [tensor.name for tensor in definition.outputs.values()]
        start = time.perf_counter()
        session.run(fetch, feed)
        return time.perf_counter() - start

    random = np.random.default_rng(1)
    took: list[float] = []

    def serve(until: threading.Event) -> list[float]:
        found = []
        while not until.is_set() or len(found) < 100:
            found.append(1e3 * ask("serving_default", id=random.integers(0, rows, asked)))
        return found

    done = threading.Event()
    done.set()
    serve(done)  # the first requests optimize the graph
    alone = [ms for _ in range(5) for ms in serve(done)]

    def apply() -> None:
        for path in deltas:
            took.append(ask("apply_delta", delta_bytes=Path(path).read_bytes()))
            time.sleep(0.2)
        done.set()

    done.clear()
    thread = threading.Thread(target=apply)
    thread.start()
    during = serve(done)
    thread.join()
    percentiles = {
        what: {str(each): float(np.percentile(values, each)) for each in (50, 99)}
        for what, values in (("alone", alone), ("during", during))
    }
    print(json.dumps({"apply": took, **percentiles}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
