"""Rows cut into ranges of their order, so that no worker has to hold more than a range, however hot a task.

::

    rows ──sample──> bounds of the ranges
      └──range_of──> range 0 | range 1 | ...

A range is bounded by rows, compared as `plan.row_order` does, so a task can be cut anywhere, also between
rows of one time. Where ranges are cut hangs on what happened to be sampled; what is made of them doesn't
(`gmeta.preprocess.plan.numbering`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gmeta.preprocess.columns import Columns, Ints, join_rows, row_count, take
from gmeta.preprocess.plan import placement as plan


class Sampler:
    """Keeps every ``stride``-th row, and fewer the more come.

    Args:
      most: Rows that are kept, at most.

    Attributes:
      stride: Of how many rows one is kept.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most, self._next = most, 0
        self._kept: list[Columns] = []
        self.stride = 1

    def add(self, rows: Columns) -> None:
        """Look at some rows."""
        count = row_count(rows)
        chosen = np.arange(self._next, count, self.stride)
        self._next += len(chosen) * self.stride - count
        if len(chosen):
            self._kept.append(take(rows, chosen))
        while (kept := sum(map(row_count, self._kept))) > self._most:
            rows = join_rows(self._kept)
            self._kept = [take(rows, np.arange(0, kept, 2))]
            self._next += self.stride if kept % 2 else 0
            self.stride *= 2

    def rows(self) -> Columns | None:
        """What is kept, or None."""
        return join_rows(self._kept) if self._kept else None


def bounds_of(samples: Iterable[tuple[int, Columns]], order: Sequence[str], ranges: int) -> Columns | None:
    """The first row of every range but the first, by samples.

    Args:
      samples: (stride, rows) of several `Sampler`.
      order: What rows are compared by: `TableSpec.order`, or the task alone where none may be cut.
      ranges: How many ranges there are to be.
    """
    found = list(samples)
    longest = max((stride for stride, _ in found), default=1)
    thinned = [take(rows, np.arange(0, row_count(rows), longest // stride)) for stride, rows in found]
    if not thinned:
        return None
    rows = join_rows(thinned)
    sorted_rows = plan.row_order(rows, order)
    return take(rows, sorted_rows[np.arange(1, ranges) * len(sorted_rows) // ranges])


def range_of(rows: Columns, bounds: Columns | None, order: Sequence[str]) -> Ints:
    """The range of each row (N,): the number of bounds that aren't after it."""
    count = row_count(rows)
    if bounds is None or not row_count(bounds):
        return np.zeros(count, np.int64)
    first = row_count(bounds)
    # Bounds stand before rows, and sorting is stable: a row that equals a bound comes after it.
    sorted_rows = plan.row_order(join_rows([{name: bounds[name] for name in rows}, rows]), order)
    is_row = sorted_rows >= first
    found = np.empty(count, np.int64)
    found[sorted_rows[is_row] - first] = np.cumsum(~is_row)[is_row]
    return found
