"""Task batches made on the spot, as `gmeta.io.tasks` gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Batch = dict[str, Any]


def task_batch(
    sizes: Sequence[int],
    query: int = 3,
    *,
    ids: Mapping[str, int] | None = None,
    floats: Sequence[str] = (),
    seed: int = 0,
    pad: int = 0,
) -> Batch:
    """Tasks of the given support sizes, with drawn features and labels.

    Args:
      sizes: How many support samples each task has.
      query: How many query samples each has.
      ids: Feature -> below which number its ids are; few, so that support and query share some.
      floats: Columns of float32 besides.
      seed: Of what is drawn.
      pad: Columns of padding behind the longest support set.
    """
    rng = np.random.default_rng(seed)
    whole = np.asarray(sizes) + query
    starts, total = np.cumsum([0, *whole])[:-1], int(whole.sum())
    steps = np.arange(max(sizes) + pad)
    real = steps < np.asarray(sizes)[:, None]
    features = {name: tf.constant(rng.integers(0, n, total)) for name, n in (ids or _IDS).items()}
    features |= {name: tf.constant(rng.normal(size=total), tf.float32) for name in floats}
    return {
        "features": features,
        "label": tf.constant(rng.normal(size=total), tf.float32),
        "task": tf.range(len(sizes), dtype=tf.int64),
        "support": {
            "index": tf.constant(np.where(real, starts[:, None] + steps, 0)),
            "mask": tf.constant(real, tf.float32),
        },
        "query": {
            "index": tf.constant(starts[:, None] + np.asarray(sizes)[:, None] + np.arange(query)),
            "mask": tf.ones([len(sizes), query]),
        },
    }


def alone(batch: Batch, task: int) -> Batch:
    """One task of a batch as a batch of its own, without padding."""
    parts = {
        part: tf.boolean_mask(batch[part]["index"][task], batch[part]["mask"][task] > 0)
        for part in ("support", "query")
    }
    sizes = {part: int(tf.size(index)) for part, index in parts.items()}
    rows = tf.concat(list(parts.values()), axis=0)
    first = {"support": 0, "query": sizes["support"]}
    return {
        "features": {name: tf.gather(values, rows) for name, values in batch["features"].items()},
        "label": tf.gather(batch["label"], rows),
        "task": batch["task"][task : task + 1],
        **{
            part: {
                "index": tf.range(first[part], first[part] + size, dtype=tf.int64)[tf.newaxis],
                "mask": tf.ones([1, size]),
            }
            for part, size in sizes.items()
        },
    }


def opposed_tasks(
    batches: int, tasks: int = 16, *, support: int = 6, query: int = 4, seed: int = 0
) -> list[Batch]:
    """Tasks half of which like the very items that the others dislike; only the support says which.

    A model that doesn't adapt can do no better than to predict 0, at a mean squared error of 1.
    """
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(batches):
        batch = task_batch(
            [support] * tasks, query, ids={"user": 1, "item": 8}, seed=int(rng.integers(1 << 30))
        )
        liked = np.where(batch["features"]["item"].numpy() % 2, 1.0, -1.0)
        signs = np.repeat(rng.choice([-1.0, 1.0], tasks), support + query)
        made.append({**batch, "label": tf.constant(liked * signs, tf.float32)})
    return made


def dataset(batches: Sequence[Batch], *, known: bool = True) -> tf.data.Dataset:
    """Batches of different numbers of tasks and samples as a data set, of known size or not."""

    def spec(part: tf.Tensor) -> tf.TensorSpec:
        return tf.TensorSpec([None] * part.shape.rank, part.dtype)

    signature = tf.nest.map_structure(spec, batches[0])
    made = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return made.apply(tf.data.experimental.assert_cardinality(len(batches))) if known else made


_IDS = {"user": 5, "item": 6}
