"""RocksDB: the key of a stripe is a user and a time; the value has the stripe's columns, unencoded."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import rocksdict
from numpy.typing import NDArray
from parts.history_formats.events import COLUMNS, READ, STRIPE, Events
from parts.history_formats.newest import Histories, first_not_before, newest, ragged

_KEY = struct.Struct(">qq")  # ascends with the user and the time, if both are at least 0
_EVENT = sum(4 if name == "price" else 8 for name in COLUMNS)  # bytes
_FIRST = COLUMNS[:5]  # the columns that are read, in one piece


class RocksDB:
    """A RocksDB database, filled by ingesting a table in bulk.

    Args:
      folder: An empty one, for its files.
      events: The events to store.
      compression: The codec of its blocks.
      by_index: Whether to fetch values by keys from an index in memory, all of a call at once; else iterate
        backwards.

    Attributes:
      size: Bytes of its tables.
    """

    def __init__(self, folder: Path, events: Events, *, compression: str, by_index: bool) -> None:
        options = rocksdict.Options(raw_mode=True)
        options.set_compression_type(getattr(rocksdict.DBCompressionType, compression)())
        options.set_allow_mmap_reads(compression == "none")
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_size(16 << 10)
        blocks.set_format_version(5)
        options.set_block_based_table_factory(blocks)
        owners, begins, ends = events.stripes()
        self._users, self._first = events.users, events.columns["time"][begins]
        self._begins = np.searchsorted(owners, np.arange(len(events.users) + 1))
        self._keys: list[bytes] = []
        writer = rocksdict.SstFileWriter(options)
        writer.open(str(folder / "bulk.sst"))
        for owner, begin, end in zip(owners.tolist(), begins.tolist(), ends.tolist(), strict=True):
            key = _KEY.pack(int(events.users[owner]), int(events.columns["time"][begin]))
            writer[key] = b"".join(events.columns[name][begin:end].tobytes() for name in COLUMNS)
            self._keys.append(key)
        writer.finish()
        self._db = rocksdict.Rdict(str(folder / "db"), options)
        self._db.ingest_external_file([str(folder / "bulk.sst")])
        self.size = sum(file.stat().st_size for file in (folder / "db").glob("*.sst"))
        self._by_index = by_index

    def scan(self, requests: NDArray[np.void], longest: int) -> Histories:
        """Answer requests; see `GMeta.scan`."""
        fetch = self._fetch if self._by_index else self._iterate
        stripes = longest // STRIPE + 2
        while True:
            values, counts, whole = fetch(requests, stripes)
            pieces = [np.frombuffer(v, np.int64, len(v) // _EVENT * len(_FIRST)) for v in values]
            table = np.concatenate([piece.reshape(len(_FIRST), -1) for piece in pieces], axis=1)
            columns = dict(zip(_FIRST, table, strict=True))
            edges = np.concatenate([[0], np.cumsum([len(value) // _EVENT for value in values])])
            ends = edges[np.cumsum(counts)]
            begins = np.concatenate([[0], ends[:-1]])
            rows, found = newest(columns["time"], columns["birth"], begins, ends, requests, longest)
            if not ((found < longest) & ~whole).any():
                break
            stripes *= 4
        row_splits = np.concatenate([[0], np.cumsum(found)])
        return Histories(row_splits, [columns[name][rows] for name in READ])

    def _fetch(
        self, requests: NDArray[np.void], stripes: int
    ) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.bool_]]:
        """Fetch the newest stripes of all requests at once."""
        users = np.searchsorted(self._users, requests["user"])
        begins = self._begins[users]
        ends = first_not_before(self._first, begins, self._begins[users + 1], requests["until"])
        starts = np.maximum(begins, ends - stripes)
        numbers = ragged(starts, ends - starts).tolist()
        return self._db.get([self._keys[number] for number in numbers]), ends - starts, starts == begins

    def _iterate(
        self, requests: NDArray[np.void], stripes: int
    ) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.bool_]]:
        """Iterate backwards from the moment of each request."""
        values: list[bytes] = []
        counts, cursor = [], self._db.iter()
        for user, until in zip(requests["user"].tolist(), requests["until"].tolist(), strict=True):
            cursor.seek_for_prev(_KEY.pack(user, until - 1))
            prefix, found = _KEY.pack(user, 0)[:8], []
            while len(found) < stripes and cursor.valid() and cursor.key()[:8] == prefix:
                found.append(cursor.value())
                cursor.prev()
            counts.append(len(found))
            values += found[::-1]
        return values, np.array(counts), np.array(counts) < stripes
