"""How many micro-batches use a row, with samples in their order, and grouped by shared keys."""

from __future__ import annotations

import gmeta  # noqa: F401
from gmeta.ops.distinct import cluster_units

import numpy as np
import tensorflow as tf
from harness import Result

SAMPLES, KEYS, PARTS = 2048, 10, 8
ROWS, SKEW, INTERESTS = 100_000, 1.05, 64


def cluster_shares(seed: int = 0) -> list[Result]:
    """Return for both orders the share of rows in only one micro-batch, and the micro-batches of a row.

    Samples draw their keys from all rows, or from the rows of one of `INTERESTS` interests.
    """
    results = []
    for name, interests in (("independent", 1), ("of_interests", INTERESTS)):
        keys = _draw(np.random.default_rng(seed), interests)
        units = np.repeat(np.arange(SAMPLES), KEYS)
        sizes = [SAMPLES // PARTS] * PARTS
        together = cluster_units(tf.constant(keys.reshape(-1)), tf.constant(units), sizes).numpy()
        for way, order in (("in_order", np.arange(SAMPLES)), ("together", together)):
            parts = [np.unique(part) for part in np.split(keys[order], PARTS)]
            uses = np.unique(np.concatenate(parts), return_counts=True)[1]
            results += [
                Result(f"pipeline/clusters/{name}/{way}/rows_of_one_part", 100 * np.mean(uses == 1), "%"),
                Result(f"pipeline/clusters/{name}/{way}/parts_of_a_row", float(np.mean(uses)), "parts"),
            ]
    return results


def _draw(rng: np.random.Generator, interests: int) -> np.ndarray:
    """Draw the keys of each sample, with Zipf's law within its interest's part of the rows."""
    weights = np.arange(1, ROWS // interests + 1, dtype=np.float64) ** -SKEW
    places = rng.choice(len(weights), [SAMPLES, KEYS], p=weights / weights.sum())
    return places * interests + rng.integers(0, interests, [SAMPLES, 1])
