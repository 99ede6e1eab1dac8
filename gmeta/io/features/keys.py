"""Requested keys and times: checked, made distinct, and cut into requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError

Ints = npt.NDArray[np.int64]
NEWEST = 2**63 - 2
"""The largest version; HBase has the same limit."""


def int64_vector(what: str, values: npt.ArrayLike, name: str) -> Ints:
    """Convert values to (n,) int64; uint64 are taken as the int64 of the same bits.

    Raises:
      ConfigError: They are of another form; the error begins with ``name``.
    """
    array = np.asarray(values)
    if array.shape == (0,):
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{name}: {what} must be (n,) int64, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def times(as_of: npt.ArrayLike | None, count: int, resolution: int, name: str) -> Ints | None:
    """Return the time of each of ``count`` keys, rounded down to a multiple of the resolution; None stays.

    Raises:
      ConfigError: ``as_of`` is neither one version nor one for each key.
    """
    if as_of is None:
        return None
    when = np.asarray(as_of)
    if when.shape == (count,) == (0,):
        return np.zeros(0, np.int64)
    whole = when.dtype.kind in "iu" and when.shape in ((), (count,))
    if not whole or (when < 0).any() or (when > np.iinfo(np.int64).max).any():
        seen = f", from {when.min()} to {when.max()}" if whole else ""
        raise ConfigError(
            f"{name}: as_of must be one version, in [0, 2^63), or one for each of {count} keys, got "
            f"{when.dtype} of shape {when.shape}{seen}"
        )
    return np.broadcast_to(when.astype(np.int64) // resolution * resolution, count)


def distinct(keys: Ints, as_of: Ints | None) -> tuple[Ints, Ints | None, Ints]:
    """Return the distinct pairs, sorted by as_of and then key, and each pair's place among them."""
    unique, inverse = np.unique(keys, return_inverse=True)
    if as_of is None or len(keys) == 0:
        return unique, None if as_of is None else as_of[:0], inverse
    moments, at = np.unique(as_of, return_inverse=True)
    pairs, inverse = np.unique(at * len(unique) + inverse, return_inverse=True)
    return unique[pairs % len(unique)], moments[pairs // len(unique)], inverse


def request_slices(count: int, most: int, one_time: Ints | None) -> Iterator[slice]:
    """Yield the rows of each request: ``most`` at most, and all of one time if ``one_time`` is given."""
    ends = [count]
    if one_time is not None:
        ends = [*(np.flatnonzero(np.diff(one_time)) + 1).tolist(), count]
    begin = 0
    for end in ends:
        for first in range(begin, end, most):
            yield slice(first, min(first + most, end))
        begin = end
