"""Batches of ids by Zipf's law, and what a cache of the ids that were used last has of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def batches(rows: int, size: int, skew: float, seed: int) -> Iterator[Ids]:
    """Draw the distinct ids of batches, endlessly; a skew of 0 is uniform."""
    draw = Zipf(rows, skew, seed)
    while True:
        yield np.unique(draw.ids(size))


class Zipf:
    """Draws ids by Zipf's law. An id's rank is random, so that hot ids don't lie side by side.

    Args:
      rows: How many ids there are, from 0.
      skew: The exponent; 0 is uniform.
      seed: Of the ranks and the draws.
    """

    def __init__(self, rows: int, skew: float, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._order = self._random.permutation(rows)
        self._shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -skew)

    def ids(self, size: int) -> Ids:
        """Draw so many ids, in the order in which they come."""
        drawn = np.searchsorted(self._shares, self._random.random(size) * self._shares[-1])
        return self._order[drawn].astype(np.int64)


class Cache(NamedTuple):
    """What Che's approximation says of a cache.

    Attributes:
      hits: Share of a batch's distinct ids that it holds.
      batches: After so many without it, an id is gone. A cache that has seen a few times as many is warm.
    """

    hits: float
    batches: float


def che(rows: int, cached: int, skew: float, size: int) -> Cache:
    """Approximate a cache of the ``cached`` ids that were used last, by batches of ``size`` draws.

    An id of which a batch has one with probability q is there if it came within the last T batches, T such
    that ``cached`` ids did in the mean: ``1 - (1 - q)^T`` (Che, Tung and Wang, 2002).
    """
    share = np.arange(1, rows + 1, dtype=np.float64) ** -skew
    never = size * np.log1p(-np.minimum(share / share.sum(), 1 - 1e-12))  # log of 1 - q
    low, high = np.log(1e-3), np.log(1e9)
    for _ in range(40):
        middle = (low + high) / 2
        held = -np.expm1(np.exp(middle) * never)
        low, high = (middle, high) if held.sum() < cached else (low, middle)
    once = -np.expm1(never)
    return Cache(float((once * held).sum() / once.sum()), float(np.exp(high)))
