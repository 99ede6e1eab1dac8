"""The losses in NumPy by their formulas, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gmeta.initializers import philox4x32

Floats = NDArray[np.float64]


def sampled_softmax(
    queries: ArrayLike,
    positives: ArrayLike,
    ids: ArrayLike,
    negatives: ArrayLike | None = None,
    negative_ids: ArrayLike | None = None,
    *,
    temperature: float,
    normalize: bool = True,
    in_batch: bool = True,
    real: ArrayLike | None = None,
    log_q: ArrayLike | None = None,
    negative_log_q: ArrayLike | None = None,
) -> Floats:
    """As `gmeta.losses.SampledSoftmax`, in float64; negatives (m, d) or (n, m, d).

    Args:
      queries: (n, d).
      positives: (n, d).
      ids: (n,).
      negatives: The vectors of drawn items.
      negative_ids: (m,) or (n, m).
      temperature: The divisor of products.
      normalize: Whether vectors are divided by their lengths.
      in_batch: Whether other samples' positives are negatives.
      real: (n,), False in the padding.
      log_q: (n,).
      negative_log_q: Of the shape of the negatives' ids.

    Returns:
      (n,) losses.
    """
    query, positive = np.asarray(queries, np.float64), np.asarray(positives, np.float64)
    item, count = np.asarray(ids), len(query)
    exists = np.ones(count, bool) if real is None else np.asarray(real, bool)
    bias = np.zeros(count) if log_q is None else np.asarray(log_q, np.float64)
    empty = np.zeros((count, 0))
    drawn = np.zeros((count, 0, query.shape[1]))
    drawn_ids, drawn_bias = empty, empty
    if negatives is not None:
        given = np.asarray(negatives, np.float64)
        drawn = np.broadcast_to(given, (count, *given.shape[-2:]))
        drawn_ids = np.broadcast_to(np.asarray(negative_ids), drawn.shape[:2])
        by = 0.0 if negative_log_q is None else np.asarray(negative_log_q, np.float64)
        drawn_bias = np.broadcast_to(by, drawn.shape[:2])

    def score(x: Floats, y: Floats) -> float:
        if normalize:
            x, y = (z / max(float(np.sqrt((z * z).sum())), 1e-6) for z in (x, y))
        return float(x @ y) / temperature

    losses = np.zeros(count)
    for i in np.flatnonzero(exists):
        own = score(query[i], positive[i]) - bias[i]
        others = [
            score(query[i], positive[j]) - bias[j]
            for j in range(count)
            if in_batch and exists[j] and item[j] != item[i]
        ]
        others += [
            score(query[i], drawn[i, j]) - drawn_bias[i, j]
            for j in range(drawn.shape[1])
            if drawn_ids[i, j] != item[i]
        ]
        losses[i] = np.logaddexp.reduce([own, *others]) - own
    return losses


def product_cross_entropy(labels: ArrayLike, logits: Sequence[ArrayLike]) -> Any:
    """As `gmeta.losses.multi_task.product_cross_entropy`, by its definition, in the longest floats that NumPy
    has.

    Args:
      labels: Numbers from 0 to 1.
      logits: Tensors of that shape.

    Returns:
      Losses of that shape, long doubles: accurate to float64 while 1 - p is above 1e-3.
    """
    label = np.asarray(labels, np.longdouble)
    p = np.prod([1 / (1 + np.exp(-np.asarray(logit, np.longdouble))) for logit in logits], axis=0)
    return -label * np.log(p) - (1 - label) * np.log(1 - p)


def uniform_negatives(count: int, items: int, *, seed: int, step: int) -> NDArray[np.int64]:
    """As `gmeta.losses.softmax.uniform_negatives`, from the words of Philox4x32-10.

    Args:
      count: The number of draws.
      items: The size of the catalogue.
      seed: The key.
      step: The upper half of the counter.

    Returns:
      (count,) int64.
    """
    blocks = np.arange((count + 1) // 2, dtype=np.uint64)
    thirty_two = np.uint64(32)
    counter = [
        blocks,
        0 * blocks,
        0 * blocks + np.uint64(step & 0xFFFFFFFF),
        0 * blocks + np.uint64(step >> 32),
    ]
    words = philox4x32(seed, counter, np.uint64, lambda word: word >> thirty_two)
    pairs = np.stack([words[0] | words[1] << thirty_two, words[2] | words[3] << thirty_two], axis=1)
    return (pairs.ravel()[:count] % np.uint64(items)).astype(np.int64)
