"""Reads a shard of a store: its index, and the histories of its users."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess.history.stripe import describe_fault, history_library

PLACE = np.dtype(
    [
        (name, np.int64)
        for name in ("group", "file", "offset", "bytes", "events", "first", "last", "born_first", "born_last")
    ]
)
"""The place of a stripe (``StripePlace`` in ``io/history/shard_index.h``)."""

REQUEST = np.dtype([(name, np.int64) for name in ("user", "start", "until", "generation")])
"""A request for a history: the events with ``start <= time < until`` that `generation` held."""


class Index(NamedTuple):
    """The index of a shard.

    Attributes:
      users: (U,) int64, ascending.
      ends: (U,) int64: the end of each user's stripes in `places`.
      deletions: (U,) int64: the generation that deleted all events before it; 0 if there was none.
      places: (S,) `PLACE`; a user's are ordered by group, file and offset.
    """

    users: NDArray[np.int64]
    ends: NDArray[np.int64]
    deletions: NDArray[np.int64]
    places: NDArray[np.void]


class Histories(NamedTuple):
    """Histories, one after another.

    Attributes:
      row_splits: (R + 1,) int64: request ``i`` has the events ``row_splits[i]`` to ``row_splits[i + 1] - 1``.
      columns: For each column (E,) int64; those of float32 are the bits of the numbers (`as_floats`).
    """

    row_splits: NDArray[np.int64]
    columns: list[NDArray[np.int64]]


class ShardReader:
    """A reader of one shard.

    Args:
      index: The bytes of the shard's index.
      files: The file's number, as the index names it -> its path.
      where: What an error calls the index.

    Raises:
      DataError: The index is damaged.
    """

    def __init__(self, index: bytes, files: Mapping[int, str | os.PathLike[str]], *, where: str) -> None:
        self._where, self._files = where, {number: os.fspath(path) for number, path in files.items()}
        self._reader = history_library().gmeta_history_reader_new()
        _need(self._reader)
        fault = history_library().gmeta_history_index_decode(self._reader, index, len(index))
        _need(fault >= 0)
        if fault:
            self.close()
            raise DataError(
                describe_fault("index", fault), path=where, advice="restore the file, or drop this generation"
            )
        for number, path in self._files.items():
            done = history_library().gmeta_history_reader_file(self._reader, number, os.fsencode(path))
            _need(done >= 0)

    def index(self) -> Index:
        """Return a copy of the index."""
        users = history_library().gmeta_history_index_users(self._reader)
        stripes = history_library().gmeta_history_index_stripes(self._reader)
        own = np.empty((3, users), np.int64)
        found = Index(own[0], own[1], own[2], np.empty(stripes, PLACE))
        history_library().gmeta_history_index_copy(self._reader, *(part.ctypes.data for part in found))
        return found

    def scan(
        self, requests: NDArray[np.void], columns: Sequence[int], *, group: int = 0, longest: int
    ) -> Histories:
        """Rebuild histories.

        Args:
          requests: (R,) `REQUEST`, of users of this shard, in any order. A user that isn't there has none.
          columns: The numbers of the stripes' columns: 0 is the time, 1 the birth, others are the group's.
          group: The number of the group of columns.
          longest: The most events of a history: its newest.

        Returns:
          The histories, each in the order of (time, birth).

        Raises:
          DataError: A stripe is damaged, or can't be read.
        """
        requests = np.ascontiguousarray(requests, REQUEST)
        chosen = np.ascontiguousarray(columns, np.int64)
        row_splits, at, place = np.empty(len(requests) + 1, np.int64), ctypes.c_int64(), np.zeros(1, PLACE)
        values = (ctypes.c_void_p * max(len(chosen), 1))()
        fault = history_library().gmeta_history_scan(
            self._reader,
            *(len(requests), requests.ctypes.data, group, longest, len(chosen), chosen.ctypes.data),
            *(row_splits.ctypes.data, values, ctypes.byref(at), place.ctypes.data),
        )
        _need(fault >= 0)
        if fault:
            raise self._fault(describe_fault("stripe", fault), requests[at.value], place[0])
        size = int(row_splits[-1])
        return Histories(row_splits, [_copy(values[number], size) for number in range(len(chosen))])

    def close(self) -> None:
        """Free the reader; a second call does nothing."""
        if self._reader:
            history_library().gmeta_history_reader_free(self._reader)
            self._reader = None

    def _fault(self, said: str, request: np.void, place: np.void) -> DataError:
        path = self._files.get(int(place["file"]))
        if path is None:
            return DataError(
                f"user {request['user']} has events in generation {place['file']}, which isn't there",
                path=self._where,
            )
        return DataError(
            f"user {request['user']}, stripe of {place['bytes']:,} bytes: {said}",
            path=path,
            offset=int(place["offset"]),
            advice="`gmeta history verify` finds all damage",
        )


def encode_index(index: Index) -> bytes:
    """Return the bytes of an index."""
    reader, size = history_library().gmeta_history_reader_new(), ctypes.c_int64()
    _need(reader)
    try:
        numbers = [np.ascontiguousarray(part, np.int64) for part in index[:-1]]
        places = np.ascontiguousarray(index.places, PLACE)
        pointers = [part.ctypes.data for part in (*numbers, places)]
        data = history_library().gmeta_history_index_encode(
            reader, len(index.users), *pointers, ctypes.byref(size)
        )
        _need(data)
        return ctypes.string_at(data, size.value)
    finally:
        history_library().gmeta_history_reader_free(reader)


def _copy(address: int | None, size: int) -> NDArray[np.int64]:
    if not size:
        return np.empty(0, np.int64)
    return np.ctypeslib.as_array((ctypes.c_int64 * size).from_address(address or 0)).copy()


def _need(given: object) -> None:
    if not given:
        raise MemoryError("no memory for a reader of histories")


# The checksum of a history, which shows whether a reader rebuilds the ranker's history.


def history_crc_of_splits(row_splits: ArrayLike, columns: Sequence[ArrayLike]) -> NDArray[np.int64]:
    """Compute the checksum of each history: the CRC-32C of its columns, one after another.

    Every value is a word of 64 bits, little end first; a float32 is its bits, with zeros above. A ranker logs
    the number beside the exposure, and ``gmeta.io.late(check="crc")`` compares the history with it.
    `gmeta.io.histories.history_plan.history_crc_of_ragged` computes the same in TensorFlow.

    Args:
      row_splits: (R + 1,) int64: history ``i`` has the values ``row_splits[i]`` to ``row_splits[i + 1] - 1``.
      columns: For each column its values (E,), int64 or float32, in the order that `late` names them in.

    Returns:
      (R,) int64, from 0 to 2^32 - 1; 0 for a history without events.

    Raises:
      ConfigError: ``row_splits`` doesn't ascend from 0 to E, or a column is of another type or length.

    Example:
      >>> history_crc_of_splits([0, 2, 2], [np.array([7, 9]), np.array([0.5, 2.0], np.float32)]).tolist()
      [1671835289, 0]

    References:
      Versioned Late Materialization, section 3.3.
    """
    splits = np.ascontiguousarray(row_splits, np.int64)
    if splits.ndim != 1 or not len(splits) or splits[0] != 0 or np.any(splits[1:] < splits[:-1]):
        raise ConfigError(
            f"history_crc_of_splits: row_splits must be a vector that ascends from 0, got {row_splits!r}"
        )
    if not columns:
        raise ConfigError("history_crc_of_splits: columns is empty: name the columns that the ranker read")
    crcs = np.zeros(len(splits) - 1, np.int64)
    for number, column in enumerate(columns):
        values = np.ascontiguousarray(column)
        if values.dtype not in (np.int64, np.float32) or values.shape != (splits[-1],):
            raise ConfigError(
                f"history_crc_of_splits: column {number} must be int64 or float32 of shape ({splits[-1]},), "
                f"as row_splits says; got {values.dtype} of shape {values.shape}"
            )
        is_float = values.dtype == np.float32
        history_library().gmeta_history_crc(
            len(crcs), splits.ctypes.data, is_float, values.ctypes.data, crcs.ctypes.data
        )
    return crcs
