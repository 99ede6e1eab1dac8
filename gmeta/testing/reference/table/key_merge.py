"""`gmeta.ops.merge_keys` and `gmeta.ops.fold_ids` in Python's own integers, which have no end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_WORD = 2**64


def merge_keys(
    ids: Sequence[Ints],
    features: Sequence[str],
    prefixes: Sequence[int],
    id_bits: int,
    hashed: Sequence[bool] | None = None,
    mix: bool = True,
) -> Ints:
    """``prefix | id``, one feature after another.

    Raises:
      ValueError: An id is outside [0, 2^id_bits); the message is the native op's.
    """
    limit, keys = 1 << id_bits, []
    of_features = zip(ids, features, prefixes, hashed or [False] * len(ids), strict=True)
    for values, feature, prefix, hashes in of_features:
        for position, value in enumerate(np.asarray(values).tolist()):
            if hashes:
                value = mix_fold(value) if mix else xor_fold(value, id_bits)
            if not 0 <= value < limit:
                raise ValueError(
                    f"feature '{feature}': id {value} at position {position} of {len(values)} "
                    f"is outside [0, {limit}): FeatureConfig(..., hash=True) takes any id"
                )
            keys.append(prefix | value)
    return np.array(keys, np.int64)


def mix_fold(number: int, bits: int = 56) -> int:
    """A number below 2^bits, and of others the low bits of their SplitMix64."""
    number %= _WORD
    return number if number < 2**bits else splitmix64(number) % 2**bits


def xor_fold(number: int, bits: int) -> int:
    """The upper bits, xored onto the low ones."""
    number %= _WORD
    return (number ^ (number >> bits)) % 2**bits


def splitmix64(x: int) -> int:
    """SplitMix64 of a number below 2^64."""
    x = (x + 0x9E3779B97F4A7C15) % _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _WORD
    return x ^ (x >> 31)
