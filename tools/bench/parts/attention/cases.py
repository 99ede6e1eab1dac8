"""The inputs of attention on the GPU: sequences, their pairs, and blocks of pairs for a block mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MEAN, SIGMA, LONGEST = 600, 0.8, 3000


def jagged_lengths(rng: np.random.Generator, tokens: int) -> Array:
    """Lognormal lengths with a mean of about `MEAN`, at most `LONGEST`, and ``tokens`` in total."""
    drawn = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, tokens)
    lengths = np.clip(drawn, 1, LONGEST).astype(np.int64)
    count = int(np.searchsorted(np.cumsum(lengths), tokens)) + 1
    lengths = lengths[:count]
    lengths[-1] -= lengths.sum() - tokens
    return lengths


def causal_blocks(lengths: Array, block: int) -> tuple[Array, Array]:
    """Which blocks of (rows, columns) of all sequences' tokens have some pair, and which have all.

    Returns:
      partial, full: (blocks, blocks), bool; no block is both. The tokens must be whole blocks.
    """
    documents = np.repeat(np.arange(len(lengths)), lengths).reshape(-1, block)
    first, last = documents[:, 0], documents[:, -1]
    below = np.tri(len(first), k=-1, dtype=bool)
    some = below & (last[np.newaxis] == first[:, np.newaxis]) | np.eye(len(first), dtype=bool)
    full = below & (first[np.newaxis] == last[:, np.newaxis])
    return some & ~full, full
