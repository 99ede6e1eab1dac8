"""Parquet read by pyarrow, with an index of our own: the rows and the row group of each user.

pyarrow reads whole row groups even with a page index, so only small ones let it read little. A user is in one
row group, and a row group is read once for all the requests of a call.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from parts.history_formats.events import COLUMNS, READ, Events
from parts.history_formats.newest import Histories, newest, ragged

_READ_ROWS = 1 << 18  # rows at a time, so that they stay in a cache


def write(path: Path, events: Events, *, rows: int, compression: str, **options: Any) -> NDArray[np.int64]:
    """Write a sorted Parquet file with a page index.

    Args:
      path: The file.
      events: The events to store.
      rows: About how many rows a row group has; it ends where a user does.
      compression: Its codec.
      **options: More of `ParquetWriter`'s.

    Returns:
      (G + 1,) int64: the users before which row groups begin, and how many users there are.
    """
    users = np.repeat(events.users, events.ends - events.begins)
    table = pa.table({"user": users, **{name: events.columns[name] for name in COLUMNS}})
    cuts = np.searchsorted(events.ends, np.arange(rows, len(events), rows)) + 1
    cuts = np.unique(np.concatenate([[0], cuts, [len(events.users)]]))
    edges = np.concatenate([[0], events.ends])[cuts]
    sorting = pq.SortingColumn.from_ordering(table.schema, [("user", "ascending"), ("time", "ascending")])
    with pq.ParquetWriter(
        path,
        table.schema,
        compression=compression,
        write_page_index=True,
        sorting_columns=sorting,
        **options,
    ) as writer:
        for begin, end in itertools.pairwise(edges):
            writer.write_table(table.slice(begin, end - begin), row_group_size=end - begin)
    return cuts


class PyArrow:
    """A Parquet file, and which of its row groups has which users.

    Args:
      folder: An empty one, for its file.
      events: The events to store.
      rows: About how many rows a row group has.
      compression: Its codec.
      **options: More of `ParquetWriter`'s.

    Attributes:
      size: Bytes of its file.
    """

    def __init__(self, folder: Path, events: Events, *, rows: int, compression: str, **options: Any) -> None:
        path = folder / "events.parquet"
        self._cuts = write(path, events, rows=rows, compression=compression, **options)
        self._users, self._begins, self._ends = events.users, events.begins, events.ends
        self._edges = np.concatenate([[0], events.ends])[self._cuts]
        self._file = pq.ParquetFile(path, memory_map=True, pre_buffer=False)
        self.size = path.stat().st_size

    def scan(self, requests: NDArray[np.void], longest: int) -> Histories:
        """Answer requests; see `GMeta.scan`."""
        users = np.searchsorted(self._users, requests["user"])
        order = np.argsort(users, kind="stable")
        groups = np.searchsorted(self._cuts, users[order], side="right") - 1
        needed = np.unique(groups)
        sizes = np.cumsum((self._edges[1:] - self._edges[:-1])[needed])
        counts, parts = np.empty(len(requests), np.int64), []
        for batch in np.split(needed, np.flatnonzero(np.diff(sizes // _READ_ROWS)) + 1):
            chosen = order[np.searchsorted(groups, batch[0]) : np.searchsorted(groups, batch[-1], "right")]
            columns = self._read(batch)
            starts = np.cumsum(self._edges[batch + 1] - self._edges[batch])
            starts = np.concatenate([[0], starts[:-1]]) - self._edges[batch]  # from rows of the file to these
            user = users[chosen]
            shift = starts[np.searchsorted(batch, np.searchsorted(self._cuts, user, side="right") - 1)]
            rows, counts[chosen] = newest(
                columns["time"],
                columns["birth"],
                self._begins[user] + shift,
                self._ends[user] + shift,
                requests[chosen],
                longest,
            )
            parts.append([columns[name][rows] for name in READ])
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return _as_asked(columns, counts, order)

    def _read(self, groups: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        names = list(dict.fromkeys((*READ, "birth")))
        table = self._file.read_row_groups(groups.tolist(), columns=names, use_threads=False)
        return {name: table.column(name).to_numpy() for name in names}


def _as_asked(
    columns: list[NDArray[np.int64]], counts: NDArray[np.int64], order: NDArray[np.int64]
) -> Histories:
    """Bring histories in the order of users into that of requests."""
    row_splits = np.concatenate([[0], np.cumsum(counts)])
    if (np.diff(order) > 0).all():
        return Histories(row_splits, columns)
    starts = np.empty(len(order), np.int64)
    starts[order] = np.cumsum(counts[order]) - counts[order]
    rows = ragged(starts, counts)
    return Histories(row_splits, [column[rows] for column in columns])
