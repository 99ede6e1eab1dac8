"""Reads a shard of a store: its index, its stripes, and the histories of its users.

A stripe holds some consecutive events of one user, in columns (``io/history``); `StripeEncoder` writes it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.native import FunctionTypes, load_functions

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
      columns: (E,) int64 for each column; a float32 column holds the bits of its numbers (`as_floats`).
    """

    row_splits: NDArray[np.int64]
    columns: list[NDArray[np.int64]]


class ShardReader:
    """A reader of one shard.

    Args:
      index: The bytes of the shard's index.
      files: The file's number in the index -> its path.
      where: The name of the index in errors.

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
          requests: (R,) `REQUEST`, of users of this shard, in any order. A missing user has no events.
          columns: The numbers of the stripes' columns: 0 is the time, 1 the birth, others are the group's.
          group: The number of the group of columns.
          longest: The largest number of events of a history: its newest.

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

    Every value is a little-endian word of 64 bits; a float32 is its bits, with zeros above. A ranker logs the
    checksum with the exposure, and ``gmeta.io.late(check="crc")`` compares the history with it.
    `gmeta.io.histories.history_plan.history_crc_of_ragged` computes the same in TensorFlow.

    Args:
      row_splits: (R + 1,) int64: history ``i`` has the values ``row_splits[i]`` to ``row_splits[i + 1] - 1``.
      columns: The values (E,) of each column, int64 or float32, in the order in which `late` names them.

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


# The native part of histories (``io/history``), called through ctypes.

_POINTER, _NUMBER, _FAULT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES: FunctionTypes = {
    "buffer_new": (_POINTER, []),
    "buffer_free": (None, [_POINTER]),
    "encode": (_POINTER, [_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER]),
    "open": (_FAULT, [ctypes.c_char_p, _NUMBER, _POINTER, _POINTER, _POINTER]),
    "read": (_FAULT, [ctypes.c_char_p, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER]),
    "reader_new": (_POINTER, []),
    "reader_free": (None, [_POINTER]),
    "reader_file": (_FAULT, [_POINTER, _NUMBER, ctypes.c_char_p]),
    "index_decode": (_FAULT, [_POINTER, ctypes.c_char_p, _NUMBER]),
    "index_encode": (_POINTER, [_POINTER, _NUMBER, *([_POINTER] * 5)]),
    "index_users": (_NUMBER, [_POINTER]),
    "index_stripes": (_NUMBER, [_POINTER]),
    "index_copy": (None, [_POINTER] * 5),
    "scan": (
        _FAULT,
        [_POINTER, *(_NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER), *([_POINTER] * 4)],
    ),
    "crc": (None, [_NUMBER, _POINTER, _FAULT, _POINTER, _POINTER]),
    "describe_stripe": (ctypes.c_char_p, [_FAULT]),
    "describe_index": (ctypes.c_char_p, [_FAULT]),
}


@functools.cache
def history_library() -> ctypes.CDLL:
    """Load the library, and declare the types of its functions, ``gmeta_history_*``.

    Raises:
      NativeLibraryError: It was never built, or is of another version.
    """
    return load_functions("records", "gmeta_history_", _SIGNATURES)


def describe_fault(of: str, fault: int) -> str:
    """Describe the native fault of a ``"stripe"`` or an ``"index"``."""
    words: bytes = getattr(history_library(), f"gmeta_history_describe_{of}")(fault)
    return words.decode()


MAX_EVENTS = 1 << 16
"""The most events of a stripe."""


class StripeEncoder:
    """An encoder of stripes, whose bytes depend only on the events.

    Raises:
      NativeLibraryError: The native encoder was never built, or has another version.

    Example:
      >>> encoder = StripeEncoder()
      >>> times, clicked = np.array([3, 5, 9, 4, 6]), np.array([0, 1, 0, 0, 0])
      >>> data, ends = encoder.encode([times, clicked], [3, 5])
      >>> [each.tolist() for each in read_stripe(data[: ends[0]])]
      [[3, 5, 9], [0, 1, 0]]
      >>> [each.tolist() for each in read_stripe(data[ends[0] :], columns=[0])]
      [[4, 6]]
      >>> encoder.close()
    """

    def __init__(self) -> None:
        self._buffer = history_library().gmeta_history_buffer_new()
        if not self._buffer:
            raise MemoryError("no memory for the stripe encoder")

    def encode(
        self, columns: Sequence[NDArray[Any]], ends: Sequence[int] | NDArray[np.int64]
    ) -> tuple[bytes, NDArray[np.int64]]:
        """Encode stripes.

        Args:
          columns: The values of each column for all events, (n,) int64 or float32.
          ends: The event before which each stripe ends, ascending; the last one is n.

        Returns:
          The stripes' bytes, one after another, and the byte before which each of them ends.

        Raises:
          DataError: Columns have different lengths or other dtypes, or the ends don't divide them into
            stripes of at most `MAX_EVENTS` events.
        """
        ends = np.ascontiguousarray(ends, np.int64)
        count = len(columns[0]) if columns else 0
        if any(np.ndim(column) != 1 or len(column) != count for column in columns):
            raise DataError(f"stripe: columns have shapes {[np.shape(column) for column in columns]}")
        sizes = np.diff(ends, prepend=0)
        if (sizes < 0).any() or (sizes > MAX_EVENTS).any() or (ends[-1] if len(ends) else 0) != count:
            raise DataError(
                f"stripe: ends of stripes must rise to the {count} events by 0 to {MAX_EVENTS} each, got "
                f"{ends.tolist()[:20]}"
            )
        words = [as_words(column) for column in columns]
        byte_ends = np.empty(len(ends), np.int64)
        data = history_library().gmeta_history_encode(
            self._buffer,
            len(words),
            (ctypes.c_void_p * len(words))(*(word.ctypes.data for word in words)),
            len(ends),
            ends.ctypes.data,
            byte_ends.ctypes.data,
        )
        if not data:
            raise MemoryError("no memory for encoded stripes")
        return ctypes.string_at(data, int(byte_ends[-1]) if len(ends) else 0), byte_ends

    def close(self) -> None:
        """Free the native encoder; a second call does nothing."""
        if self._buffer:
            history_library().gmeta_history_buffer_free(self._buffer)
            self._buffer = None


def read_stripe(
    data: bytes | memoryview, columns: Sequence[int] | None = None, *, where: str = "stripe"
) -> list[NDArray[np.int64]]:
    """Read columns of the stripe at the beginning of some bytes.

    Args:
      data: The bytes; those after the stripe are ignored.
      columns: The numbers of the columns; None: all.
      where: The name of the stripe in errors.

    Returns:
      The (events,) int64 values of each column; a float32 column holds the bits of its numbers (`as_floats`).

    Raises:
      DataError: The stripe is damaged, or has fewer columns.
    """
    data = bytes(data)
    count, events, size = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int64()
    fault = history_library().gmeta_history_open(
        data, len(data), ctypes.byref(count), ctypes.byref(events), ctypes.byref(size)
    )
    if fault:
        raise DataError(f"{where}: {describe_fault('stripe', fault)}")
    chosen = np.arange(count.value) if columns is None else np.asarray(columns, np.int64)
    beyond = [each for each in chosen.tolist() if each not in range(count.value)]
    if beyond:
        raise DataError(f"{where}: it has {count.value} columns, and column {beyond[0]} is requested")
    found = [np.empty(events.value, np.int64) for _ in chosen]
    at = ctypes.c_int64()
    outs = (ctypes.c_void_p * len(found))(*(out.ctypes.data for out in found))
    fault = history_library().gmeta_history_read(
        data, len(data), len(found), chosen.ctypes.data, outs, ctypes.byref(at)
    )
    if fault:
        raise DataError(
            f"{where}: {describe_fault('stripe', fault).replace('a column', f'column {at.value}')}"
        )
    return found


def as_floats(values: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the float32 numbers whose bits `read_stripe` has returned."""
    return values.astype(np.uint32).view(np.float32)


def as_words(column: NDArray[Any]) -> NDArray[np.int64]:
    """Return the int64 numbers that a stripe stores for a column: its values, or the bits of float32."""
    if column.dtype == np.float32:
        return np.ascontiguousarray(column).view(np.uint32).astype(np.int64)
    if column.dtype != np.int64:
        raise DataError(f"stripe: a column is of int64 or float32, got {column.dtype}")
    return np.ascontiguousarray(column)
