"""Small batches of tasks, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def make_batch(sizes: Sequence[int], query: int = 2, seed: int = 0, pad: int = 0) -> dict[str, Any]:
    """Tasks of the given support sizes, with ids that overlap between support and query."""
    rng = np.random.default_rng(seed)
    total = sum(sizes) + query * len(sizes)
    width = max(sizes) + pad
    starts = np.cumsum([0, *(size + query for size in sizes)])[:-1]
    steps = np.arange(width)
    mask = steps < np.array(sizes)[:, None]
    return {
        "features": {
            "user": tf.constant(np.repeat(np.arange(len(sizes)), np.array(sizes) + query), tf.int64),
            "item": tf.constant(rng.integers(0, 6, total), tf.int64),
        },
        "label": tf.constant(rng.normal(size=total), tf.float32),
        "task": tf.range(len(sizes), dtype=tf.int64),
        "support": {
            "index": tf.constant(np.where(mask, starts[:, None] + steps, 0), tf.int64),
            "mask": tf.constant(mask, tf.float32),
        },
        "query": {
            "index": tf.constant(starts[:, None] + np.array(sizes)[:, None] + np.arange(query), tf.int64),
            "mask": tf.ones([len(sizes), query]),
        },
    }


def alone(batch: Mapping[str, Any], task: int) -> dict[str, Any]:
    """One task of a batch as a batch of its own."""
    real = batch["support"]["mask"][task] > 0
    index = tf.concat([batch["support"]["index"][task][real], batch["query"]["index"][task]], axis=0)
    size, query = int(tf.reduce_sum(tf.cast(real, tf.int32))), batch["query"]["index"].shape[1]
    return {
        "features": {name: tf.gather(ids, index) for name, ids in batch["features"].items()},
        "label": tf.gather(batch["label"], index),
        "task": batch["task"][task : task + 1],
        "support": {"index": tf.range(size, dtype=tf.int64)[None], "mask": tf.ones([1, size])},
        "query": {
            "index": tf.range(size, size + query, dtype=tf.int64)[None],
            "mask": tf.ones([1, query]),
        },
    }
