"""The exact best items of a catalogue, as exported models find them (`top_items`).

    python tools/bench/top_items.py --items 1000000 --json FILE

The 100 best of random vectors of 64 numbers, for batches of users, in a ``tf.function`` on a GPU if there is
one. Milliseconds are medians of interleaved calls, with results in host memory. The peer scores the whole
catalogue, or as much at once as makes 2²⁸ scores, and calls `tf.math.top_k`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
from gmeta.models.sequence.catalogue import top_items  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from harness import Result, interleave, parser, report  # noqa: E402
from parts.notes import gpu  # noqa: E402

DIM, K, MOST = 64, 100, 1 << 28


def by_top_k(queries: tf.Tensor, vectors: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Find the best by one call of `tf.math.top_k` for each block of users."""
    block = max(1, MOST // vectors.shape[0])
    parts = [
        tf.math.top_k(tf.matmul(queries[begin : begin + block], vectors, transpose_b=True), k)
        for begin in range(0, queries.shape[0], block)
    ]
    return tuple(
        tf.concat(each, axis=0) for each in zip(*((p.indices, p.values) for p in parts), strict=True)
    )


def measure(items: int, users: list[int], rounds: int) -> list[Result]:
    """Milliseconds of a batch, and users a second."""
    results = []
    with tf.device("GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"):
        vectors = tf.random.stateless_normal([items, DIM], [1, 2])
        for count in users:
            queries = tf.random.stateless_normal([count, DIM], [3, count])
            found = {"gmeta": tf.function(top_items), "top_k": tf.function(by_top_k)}
            numbers = [each(queries, vectors, K)[0].numpy() for each in found.values()]
            if np.mean(numbers[0] == numbers[1]) < 0.99:  # sums in another order may swap neighbours
                raise AssertionError("the two find different items")

            def call(each: Any, asked: tf.Tensor, _: int) -> None:
                each(asked, vectors, K)[0].numpy()

            calls = {name: partial(call, each, queries) for name, each in found.items()}
            seconds = interleave(calls, rounds=rounds)
            name, own, peer = f"top_items/items{items}/users{count}", seconds["gmeta"], seconds["top_k"]
            results.append(Result(f"{name}/batch", 1e3 * own, "ms", "tf.math.top_k", 1e3 * peer))
            results.append(Result(f"{name}/rate", count / own, "users/s", "tf.math.top_k", count / peer))
    return results


def main() -> None:
    """Measure, and report."""
    options = parser(__doc__)
    options.add_argument("--items", type=int, nargs="+", default=[10**6], help="(default: 10^6)")
    options.add_argument("--users", type=int, nargs="+", default=[1, 16, 256], help="(default: 1 16 256)")
    given = options.parse_args()
    sizes = [5000] if given.smoke else given.items
    results = [each for items in sizes for each in measure(items, given.users, given.rounds)]
    report("The exact best of a catalogue", results, given.json, gpu=gpu())


if __name__ == "__main__":
    main()
