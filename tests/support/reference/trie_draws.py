"""Draws from tries of codes in NumPy and double precision, like `gmeta.ops.trie_draws.TrieNoise` and its
ops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gmeta.core.shares import splitmix64
from gmeta.initializers import philox4x32

Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]


class ReferenceNoise(NamedTuple):
    """The random numbers of one user at one level."""

    seed: int
    step: int
    level: int
    key: int

    def words(self, kind: int, index: Words) -> list[Words]:
        """Return the four words of each index."""
        mixed = int(splitmix64(np.array([self.seed], np.int64).astype(np.uint64))[0])
        user = np.full(index.shape, np.int64(self.key).astype(np.uint64))
        low, high = np.uint64(2**32 - 1), np.uint64(32)
        counter = [
            index & low,
            np.uint64(kind << 31 | self.level << 16) + (index >> high),
            user & low,
            user >> high,
        ]
        return philox4x32((mixed + self.step) % 2**64, counter, np.uint64, lambda x: x >> high)

    def uniform(self, beam: int) -> float:
        """Return the draw of a beam, in [0, 1]."""
        first, second = (int(word[0]) for word in self.words(0, np.array([beam], np.uint64))[:2])
        return (first << 32 | second) / 2**64

    def gumbel(self, children: npt.NDArray[np.int64]) -> Doubles:
        """Return the noise of children."""
        blocks = np.stack(self.words(1, (children // 4).astype(np.uint64)))
        u = (blocks[children % 4, np.arange(len(children))] + 0.5) / 2**32
        return -np.log(-np.log(u))


def sampled_place(log_probs: Doubles, uniform: float, margin: float = 1e-6) -> int | None:
    """Return the drawn sibling; None if the draw is within ``margin`` of two."""
    sums = np.cumsum(np.exp(log_probs))
    if np.abs(sums - uniform).min() < margin:
        return None
    return int((sums <= uniform).sum())


def gumbel_ranks(top: float, noisy: Doubles) -> Doubles:
    """Return the ranks of a beam's children: ``top`` is its own, ``noisy`` are their scores with noise."""
    with np.errstate(divide="ignore"):  # by logs, as exp(-top) may be lost beside exp(-noisy)
        rest = -noisy + np.log1p(-np.exp(noisy - noisy.max()))
    return -np.logaddexp(-top, rest)
