"""Events of an append on the disk, divided by shard, in the order in which they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import user_shards
from gmeta.core.errors import DataError
from gmeta.preprocess.columns import Columns, single
from gmeta.preprocess.history.files.stripe import as_words

MAX_TIME = 2**63 - 1
"""Times of events are below it."""


class EventSpill:
    """Rows of 64-bit words in a file for each shard.

    Args:
      folder: An empty folder.
      columns: Names of the columns, the user and the time first.
      shards: How many shards there are.

    Attributes:
      events: How many have been added.
      latest: The latest time among them; None before the first.
    """

    def __init__(self, folder: Path, columns: Sequence[str], shards: int) -> None:
        self._folder, self._columns, self._shards = folder, columns, shards
        self.events = 0
        self.latest: int | None = None

    def add(self, chunk: Columns) -> None:
        """Add events.

        Raises:
          DataError: A time is `MAX_TIME` or later: no history could end behind it.
          OSError: The disk is full.
        """
        words = np.stack([as_words(single(chunk, name)) for name in self._columns], axis=1)
        if not len(words):
            return
        last = int(words[:, 1].max())
        if last >= MAX_TIME:
            user = words[int(words[:, 1].argmax()), 0]
            raise DataError(
                f"user {user} has an event at time {last}; times must be below {MAX_TIME}",
                advice="leave the event out, or state max for this column in a spec",
            )
        shard = user_shards(words[:, 0], self._shards).astype(np.uint16)  # of which NumPy makes a radix sort
        order = np.argsort(shard, kind="stable")
        words = words[order]
        edges = np.searchsorted(shard[order], np.arange(self._shards + 1))
        for number in np.flatnonzero(np.diff(edges)).tolist():
            with self._path(number).open("ab") as file:
                file.write(words[edges[number] : edges[number + 1]].tobytes())
        self.events += len(words)
        self.latest = last if self.latest is None else max(self.latest, last)

    def take(self, shard: int) -> NDArray[np.int64]:
        """Return a shard's events, (N, columns), ordered by all their columns, and forget them.

        The values of a column lie side by side in memory.
        """
        path = self._path(shard)
        if not path.exists():
            return np.empty((0, len(self._columns)), np.int64)
        columns = np.ascontiguousarray(np.fromfile(path, np.int64).reshape(-1, len(self._columns)).T)
        path.unlink()
        return columns[:, _order(columns)].T

    def _path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.rows"


def _order(columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order of events, (columns, N), by all their columns.

    The first two, user and time, decide almost always; only what ties is ordered by the others.
    """
    user, time = columns[:2]
    order = np.lexsort((time, user))
    user, time = user[order], time[order]
    same = np.flatnonzero((user[1:] == user[:-1]) & (time[1:] == time[:-1]))
    tied = np.union1d(same, same + 1)
    order[tied] = order[tied][np.lexsort(columns[::-1, order[tied]])]
    return order
