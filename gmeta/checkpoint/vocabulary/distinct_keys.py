"""Refuses a table that has a key twice, in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import DataError

Keys = npt.NDArray[np.int64]

_KEYS = 1 << 24  # in memory at once, in about 32 bytes each

Start = tuple[int, Path, int]
"""Where a piece begins: its first row among those of all files, its file, and its first row in it."""


def refuse_twins(
    keys: Callable[[], Iterator[Keys]], starts: Sequence[Start], rows: int, id_bits: int | None
) -> None:
    """Read all keys, a share of them in each pass, and refuse a key that is there twice.

    Args:
      keys: Reads the keys of all pieces.
      starts: Where the pieces begin.
      rows: How many keys there are.
      id_bits: How many of a key's low bits are the id; None: all.

    Raises:
      DataError: A key is there twice; the message names both places.
    """
    passes = max(1, -(-rows // _KEYS))
    for number in range(passes):
        parts, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        first = 0
        for part in keys():
            own = np.flatnonzero(_mixed(part) % np.uint64(passes) == number)
            parts.append(part[own])
            places.append(own + first)
            first += len(part)
        found, at = np.concatenate(parts), np.concatenate(places)
        order = np.argsort(found, kind="stable")
        twins = np.flatnonzero(np.diff(found[order]) == 0)
        if len(twins):
            place = twins[np.argmin(at[order[twins + 1]])]
            key = int(found[order[place]]) & ((1 << id_bits) - 1 if id_bits is not None else -1)
            one, other = (_place(starts, int(at[order[i]])) for i in (place, place + 1))
            raise DataError(f"key {key} is there twice, in {one} and in {other}; keep one of them")


def _mixed(keys: Keys) -> npt.NDArray[np.uint64]:
    """Spread keys that follow a pattern over the passes."""
    return (keys.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)


def _place(starts: Sequence[Start], row: int) -> str:
    first, path, inside = starts[bisect_right([start for start, _, _ in starts], row) - 1]
    return f"{path} row {inside + row - first}"
