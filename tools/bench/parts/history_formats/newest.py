"""Finds the newest events of each request among rows in memory, for all requests at once in NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Histories(NamedTuple):
    """The answer of every form.

    Attributes:
      row_splits: (R + 1,) int64: request ``i`` has the events ``row_splits[i]`` to ``row_splits[i + 1] - 1``.
      columns: For each of `events.READ` (E,) int64.
    """

    row_splits: NDArray[np.int64]
    columns: list[NDArray[np.int64]]


def newest(
    time: NDArray[np.int64],
    birth: NDArray[np.int64],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    requests: NDArray[np.void],
    longest: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the newest events of requests.

    Args:
      time: (n,) of all rows; it ascends from ``begins[i]`` to ``ends[i] - 1``.
      birth: (n,) the generations in which they were born.
      begins: (R,) the first row of each request's user.
      ends: (R,) the row after the last one of each request's user.
      requests: (R,) `REQUEST`, with a start before all times.
      longest: The most events of a request.

    Returns:
      The rows of all requests, one request after another, and (R,) the number of rows of each.
    """
    stops = first_not_before(time, begins, ends, requests["until"])
    width = longest + longest // 8 + 16  # late events are few
    while True:
        starts = np.maximum(begins, stops - width)
        counts = stops - starts
        rows = ragged(starts, counts)
        kept = birth[rows] <= np.repeat(requests["generation"], counts)
        rows = rows[kept]
        sums = np.concatenate([[0], np.cumsum(kept)])
        edges = np.concatenate([[0], np.cumsum(counts)])
        found = np.diff(sums[edges])
        if not ((found < longest) & (starts > begins)).any():
            break
        width *= 4
    given = np.minimum(found, longest)
    return rows[ragged(np.cumsum(found) - given, given)], given


def ragged(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each start's range of consecutive numbers, one range after another."""
    return np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


def first_not_before(
    time: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64], until: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Find in each range, whose times ascend, the first place that isn't before a time.

    Args:
      time: (n,) times.
      low: (R,) the beginnings of ranges.
      high: (R,) their ends.
      until: (R,) the times to search for.

    Returns:
      (R,) the places; the end of the range if all of it is earlier.
    """
    low, high = low.copy(), high.copy()
    while (open_ := low < high).any():
        middle = (low + high) >> 1
        before = open_ & (time[np.minimum(middle, len(time) - 1)] < until)
        low = np.where(before, middle + 1, low)
        high = np.where(open_ & ~before, middle, high)
    return low
