"""Shares of the data: a step has the same number of shares for any number of ranks.

A job divides the data of every step into V shares, where V is the number of ranks with which it was started.
While the job has V ranks, each rank takes one share. When ranks are lost, the others take over their shares:
of W ranks, rank r takes the shares from r V // W up to (r + 1) V // W. A step therefore trains on the same
samples as before, in the same order of shares. Its gradient, that of the mean over the samples of all ranks,
is also the same.

This module doesn't use TensorFlow; `gmeta.core.collectives.shared_data` takes the shares' part of a data set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError

SHARES = "GMETA_SHARES"
"""Environment variable: the number of shares that the data of a step is divided into; by default the
number of ranks."""


@dataclass(frozen=True)
class Shares:
    """The shares of one rank.

    Attributes:
      first: The number of the rank's first share.
      count: How many consecutive shares the rank has.
      total: The total number of shares.
    """

    first: int
    count: int
    total: int

    @classmethod
    def of(cls, rank: int, size: int, total: int | None = None) -> Shares:
        """Return the shares of a rank among ``size`` ranks; there are ``total`` shares, by default ``size``.

        Example:
          >>> [Shares.of(rank, 2, 3) for rank in range(2)]
          [Shares(first=0, count=1, total=3), Shares(first=1, count=2, total=3)]
        """
        total = size if total is None else total
        first = rank * total // size
        return cls(first, (rank + 1) * total // size - first, total)

    def steps(self, elements: int) -> int:
        """Return how many steps these shares have data for.

        The data set has ``elements`` elements; element i belongs to share i mod total.
        """
        return max(0, -(-(elements - self.first) // self.total))


def total_shares(ranks: int) -> int:
    """Return how many shares a job of this many ranks divides the data of a step into.

    Raises:
      ConfigError: The environment variable isn't a number, or is below the number of ranks.
    """
    text = os.environ.get(SHARES)
    if text is None:
        return ranks
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{SHARES}={text!r} is no number of shares of the data; unset it, or give at least 1"
        )
    if int(text) < ranks:
        raise ConfigError(
            f"{SHARES}={text}, but there are {ranks} ranks: a rank without a share has nothing to do; start "
            f"at most {text}"
        )
    return int(text)


# Logical shards: how the keys of a table are divided among ranks, and how a table is saved.
#
# A key's logical shard is the top ten bits of its MurmurHash3: the same in every process. Each rank owns a
# run of consecutive shards. Any number of ranks can therefore load what any other number saved, and each rank
# reads only its own shards.

LOGICAL_SHARDS = 1024


def owned_shards(rank: int, world_size: int) -> range:
    """Return the logical shards of a rank: shard s belongs to rank ``s * world_size // 1024``.

    Args:
      rank: 0 up to ``world_size - 1``.
      world_size: How many ranks there are, 1 up to 1024.

    Raises:
      ConfigError: There is no such rank, or there are more ranks than shards.

    Example:
      >>> [len(owned_shards(rank, 3)) for rank in range(3)]
      [342, 341, 341]
    """
    if not 1 <= world_size <= LOGICAL_SHARDS:
        raise ConfigError(f"world_size must lie in [1, {LOGICAL_SHARDS}], got {world_size}")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must lie in [0, {world_size}), got {rank}")
    return range(*(-(-edge * LOGICAL_SHARDS // world_size) for edge in (rank, rank + 1)))


# A hash of 64-bit numbers, and the equal ranges into which it is divided.

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
    """Return in which of a number of equal, ascending ranges of 64-bit numbers each key lies."""
    return (((key >> np.uint64(32)) * np.uint64(ranges)) >> np.uint64(32)).astype(np.int64)
