"""Cutting of the ordered rows into ranges: a worker holds at most one range, however many rows a task has.

::

    rows ──sample──> bounds of the ranges
      └──range_of──> range 0 | range 1 | ...

The bounds of a range are rows, compared as in `plan.row_order`. So a task can be cut anywhere, also between
rows with the same time. The cuts depend on the sampled rows; the final result doesn't
(`gmeta.preprocess.plan.numbering`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gmeta.preprocess.columns import Columns, Ints, join_rows, row_count, take
from gmeta.preprocess.plan import placement as plan


class Sampler:
    """A sampler that keeps every ``stride``-th row; the stride grows with the number of rows.

    Args:
      most: The largest number of rows to keep.

    Attributes:
      stride: One row of so many is kept.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most, self._next = most, 0
        self._kept: list[Columns] = []
        self.stride = 1

    def add(self, rows: Columns) -> None:
        """Sample the next rows."""
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
        """Return the kept rows, or None if there are none."""
        return join_rows(self._kept) if self._kept else None


def bounds_of(samples: Iterable[tuple[int, Columns]], order: Sequence[str], ranges: int) -> Columns | None:
    """Choose the first row of every range except the first, from samples.

    Args:
      samples: (stride, rows) of several `Sampler`.
      order: The columns that rows are compared by: `TableSpec.order`, or the task alone if no task may be
        cut.
      ranges: The number of ranges to make.
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
    """Return the range of each row (N,): the number of bounds that don't come after it."""
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
