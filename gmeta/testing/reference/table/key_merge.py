"""`gmeta.ops.merge_keys` in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def merge_keys(ids: Sequence[Ints], features: Sequence[str], prefixes: Sequence[int], id_bits: int) -> Ints:
    """``prefix | id``, one feature after another.

    Raises:
      ValueError: An id is outside [0, 2^id_bits); the message is the native op's.
    """
    limit = 1 << id_bits
    for values, feature in zip(ids, features, strict=True):
        for position, value in enumerate(np.asarray(values).tolist()):
            if not 0 <= value < limit:
                raise ValueError(
                    f"feature '{feature}': id {value} at position {position} of {len(values)} "
                    f"is outside [0, {limit}): FeatureConfig(..., hash=True) takes any id"
                )
    keys = [np.asarray(v, np.int64) | np.int64(prefix) for v, prefix in zip(ids, prefixes, strict=True)]
    return np.concatenate(keys)
