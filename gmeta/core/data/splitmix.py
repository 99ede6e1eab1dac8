"""A hash of 64-bit numbers, and the equal ranges that it is divided into."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ODD = 0x9E3779B97F4A7C15
"""The number that SplitMix64 adds before it mixes."""

_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number (SplitMix64, Steele, Lea and Flood, 2014); a bijection."""
    x = x + np.uint64(ODD)  # on arrays, arithmetic wraps at 2^64
    for shift, factor in _ROUNDS:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(_LAST))


def splitmix64_tensor(x: Any) -> Any:
    """Compute `splitmix64` of a uint64 tensor by TensorFlow's own ops."""
    import tensorflow as tf  # `gmeta.preprocess`, which imports this module, doesn't load it

    def xor_shift(x: Any, places: int) -> Any:
        return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(places, tf.uint64)))

    x = x + tf.constant(ODD, tf.uint64)
    for shift, factor in _ROUNDS:
        x = xor_shift(x, shift) * tf.constant(factor, tf.uint64)
    return xor_shift(x, _LAST)


def range_of(key: NDArray[np.uint64], ranges: int) -> NDArray[np.int64]:
    """Return which of so many equal, ascending ranges of the 64-bit numbers each key lies in."""
    return (((key >> np.uint64(32)) * np.uint64(ranges)) >> np.uint64(32)).astype(np.int64)
