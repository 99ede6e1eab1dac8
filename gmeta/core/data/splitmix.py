"""A hash of 64-bit numbers, and the equal ranges that it is divided into."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number (SplitMix64, Steele, Lea and Flood, 2014); a bijection."""
    x = x + np.uint64(0x9E3779B97F4A7C15)  # on arrays, arithmetic wraps at 2^64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def range_of(key: NDArray[np.uint64], ranges: int) -> NDArray[np.int64]:
    """Return which of so many equal, ascending ranges of the 64-bit numbers each key lies in."""
    return (((key >> np.uint64(32)) * np.uint64(ranges)) >> np.uint64(32)).astype(np.int64)
