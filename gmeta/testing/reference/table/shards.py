"""The hash of a key, and which logical shard it is in, in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def logical_shards(keys: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The logical shard of each key: the top ten bits of its MurmurHash3, 0 up to 1023.

    Args:
      keys: Integers of any shape that fit int64.

    Returns:
      int64, of the keys' shape.

    Example:
      >>> logical_shards([0, 1, 2])
      array([  0, 721, 234])
    """
    return (murmur_hash3(keys) >> np.uint64(54)).astype(np.int64)


def murmur_hash3(keys: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """The finalizer of MurmurHash3 in 64 bits: a bijection, of which every bit depends on all of the key."""
    h = np.asarray(keys, np.int64).astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ (h >> np.uint64(33))) * np.uint64(factor)
    return h ^ (h >> np.uint64(33))
