"""Codebooks by residual k-means."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.codebooks import Vectors, nearest
from gmeta.preprocess.semantic.balance import assign_evenly

_WHOLE = 200_000  # vectors beyond which k-means goes by batches
_BATCH = 16_384
_EVEN_ROUNDS = 5


def fit_residual_kmeans(
    vectors: Vectors, levels: int, codes: int, *, balanced: bool, seed: int
) -> tuple[tuple[Vectors, ...], NDArray[np.int32]]:
    """Cluster vectors, then what is left of them, level by level.

    Args:
      vectors: float32 (n, dim).
      levels: How many levels.
      codes: Codes of a level at most; where fewer distinct vectors are left, there are as many codes.
      balanced: Whether all codes of a level get as many vectors, up to one.
      seed: Of the first centers.

    Returns:
      The levels, each float32 (codes, dim), and the codes of the vectors, int32 (n, levels).
    """
    books, digits, left = [], [], vectors
    for level in range(levels):
        size = min(codes, len(np.unique(left, axis=0)))
        centers = _centers(left, size, seed + level)
        if balanced:
            centers, digit = _even_out(left, centers)
        else:
            digit = nearest(left, centers)
        books.append(centers)
        digits.append(digit)
        left = left - centers[digit]
    return tuple(books), np.column_stack(digits)


def _centers(vectors: Vectors, size: int, seed: int) -> Vectors:
    from sklearn.cluster import KMeans, MiniBatchKMeans

    if len(vectors) <= _WHOLE:
        fit = KMeans(size, n_init=1, random_state=seed).fit(vectors)
    else:
        fit = MiniBatchKMeans(size, n_init=1, random_state=seed, batch_size=_BATCH).fit(vectors)
    centers: Vectors = fit.cluster_centers_.astype(np.float32)
    return centers


def _even_out(vectors: Vectors, centers: Vectors) -> tuple[Vectors, NDArray[np.int32]]:
    """Move the centers to the means of evenly assigned vectors, some times."""
    digit = assign_evenly(vectors, centers)
    for _ in range(_EVEN_ROUNDS):
        sums = np.zeros(centers.shape, np.float64)
        np.add.at(sums, digit, vectors)
        centers = (sums / np.bincount(digit, minlength=len(centers))[:, None]).astype(np.float32)
        digit = assign_evenly(vectors, centers)
    return centers, digit
