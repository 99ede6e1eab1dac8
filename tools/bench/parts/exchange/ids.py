"""Ids of a click-through data set: 26 categorical features of skewed popularity."""

from __future__ import annotations

import numpy as np

SKEW = 1.05
CRITEO = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""The number of values of each categorical feature of the Criteo Kaggle data set."""
FEATURE_BITS = 40
"""The bits of an id; a key has the feature's number above them, for all features in one table."""


class ZipfIds:
    """Draws ids with probability proportional to rank^-1.05, popular ids anywhere among a feature's keys.

    Args:
      vocabularies: The number of ids of each feature.
      seed: The seed; each rank has its own.
    """

    def __init__(self, vocabularies: tuple[int, ...], seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._cumulative = [np.cumsum(np.arange(1, v + 1, dtype=np.float64) ** -SKEW) for v in vocabularies]

    def batch(self, samples: int) -> list[np.ndarray]:
        """For each feature (samples,) int64 keys."""
        keys = []
        for feature, cumulative in enumerate(self._cumulative):
            drawn = self._random.random(samples) * cumulative[-1]
            ids = np.minimum(np.searchsorted(cumulative, drawn), len(cumulative) - 1)
            keys.append((feature << FEATURE_BITS) | ids.astype(np.int64))
        return keys
