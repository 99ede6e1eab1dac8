"""Batches of ids by Zipf's law, and the share of them in a least-recently-used cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_ALONE, _GROUPS = 100_000, 20_000


def batches(rows: int, size: int, skew: float, seed: int) -> Iterator[Ids]:
    """Draw the distinct ids of batches, endlessly; a skew of 0 is uniform."""
    draw = Zipf(rows, skew, seed)
    while True:
        yield np.unique(draw.ids(size))


class Zipf:
    """Draws ids by Zipf's law. An id's rank is random, so that hot ids don't lie side by side.

    Args:
      rows: The number of ids, from 0.
      skew: The exponent; 0 is uniform.
      seed: The seed of the ranks and the draws.
    """

    def __init__(self, rows: int, skew: float, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._order = self._random.permutation(rows)
        self._shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -skew)

    def ids(self, size: int) -> Ids:
        """Draw ids, in their random order."""
        drawn = np.searchsorted(self._shares, self._random.random(size) * self._shares[-1])
        return self._order[drawn].astype(np.int64)


class Cache(NamedTuple):
    """Che's approximation of a cache.

    Attributes:
      hits: The share of a batch's distinct ids that it holds.
      batches: The number of batches without an id after which the id is evicted. After a few times as many, a
        cache is warm.
    """

    hits: float
    batches: float


def che(rows: int, cached: int, skew: float, size: int) -> Cache:
    """Approximate a cache of the ``cached`` last used ids, for batches of ``size`` draws.

    An id that a batch contains with probability q is in the cache if it occurred within the last T batches,
    where T is such that ``cached`` ids did on average: ``1 - (1 - q)^T`` (Che, Tung and Wang, 2002).
    """
    ranks, ids = _ranks(rows)
    share = ranks**-skew
    never = size * np.log1p(-np.minimum(share / (ids @ share), 1 - 1e-12))  # log of 1 - q
    low, high = np.log(1e-3), np.log(1e9)
    for _ in range(40):
        middle = (low + high) / 2
        held = -np.expm1(np.exp(middle) * never)
        low, high = (middle, high) if ids @ held < cached else (low, middle)
    once = -np.expm1(never)
    return Cache(float(ids @ (once * held) / (ids @ once)), float(np.exp(high)))


def _ranks(rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ranks, and the number of ids of each: late ones, of about equal shares, are joined."""
    edges = np.arange(1.0, min(rows, _ALONE) + 2)
    if rows > _ALONE:
        edges = np.union1d(edges, np.round(np.geomspace(_ALONE + 1, rows + 1, _GROUPS)))
    return (edges[:-1] + edges[1:] - 1) / 2, np.diff(edges)
