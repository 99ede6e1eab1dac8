"""Events of an append on the disk, divided by shard, in the order in which they come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import user_shards


class EventSpill:
    """Rows of 64-bit words in a file for each shard.

    Args:
      folder: An empty folder.
      columns: How many words a row has; the first is the user.
      shards: How many shards there are.

    Attributes:
      events: How many have been added.
    """

    def __init__(self, folder: Path, columns: int, shards: int) -> None:
        self._folder, self._columns, self._shards = folder, columns, shards
        self.events = 0

    def add(self, words: NDArray[np.int64]) -> None:
        """Add events, (N, columns).

        Raises:
          OSError: The disk is full.
        """
        shard = user_shards(words[:, 0], self._shards).astype(np.uint16)  # of which NumPy makes a radix sort
        order = np.argsort(shard, kind="stable")
        words = words[order]
        edges = np.searchsorted(shard[order], np.arange(self._shards + 1))
        for number in np.flatnonzero(np.diff(edges)).tolist():
            with self._path(number).open("ab") as file:
                file.write(words[edges[number] : edges[number + 1]].tobytes())
        self.events += len(words)

    def take(self, shard: int) -> NDArray[np.int64]:
        """Return a shard's events, (N, columns), and forget them."""
        path = self._path(shard)
        if not path.exists():
            return np.empty((0, self._columns), np.int64)
        words = np.fromfile(path, np.int64).reshape(-1, self._columns)
        path.unlink()
        return words

    def _path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.rows"


def sort_events(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return events, (N, columns), ordered by all columns; the values of a column lie side by side.

    The first two, user and time, decide almost always; only what ties is ordered by the others.
    """
    columns = np.ascontiguousarray(words.T)
    user, time = columns[:2]
    order = np.lexsort((time, user))
    user, time = user[order], time[order]
    same = np.flatnonzero((user[1:] == user[:-1]) & (time[1:] == time[:-1]))
    tied = np.union1d(same, same + 1)
    order[tied] = order[tied][np.lexsort(columns[::-1, order[tied]])]
    return columns[:, order].T
