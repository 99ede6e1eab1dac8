"""Writes and reads stripes (``io/history``): some consecutive events of one user, in columns."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError
from gmeta.core.native import FunctionTypes, load_functions

# The native part of histories (``io/history``), behind ctypes.

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
    """Load the library, and state the types of its functions, ``gmeta_history_*``.

    Raises:
      NativeLibraryError: It was never built, or is of another version.
    """
    return load_functions("records", "gmeta_history_", _SIGNATURES)


def describe_fault(of: str, fault: int) -> str:
    """Return words for the native fault of a ``"stripe"`` or an ``"index"``."""
    words: bytes = getattr(history_library(), f"gmeta_history_describe_{of}")(fault)
    return words.decode()


MAX_EVENTS = 1 << 16
"""The most events of a stripe."""


class StripeEncoder:
    """An encoder of stripes, whose bytes depend on nothing but the events.

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
          columns: For each column the values of all events, (n,) int64 or float32.
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
    """Read columns of the stripe that some bytes begin with.

    Args:
      data: The bytes; those after the stripe are ignored.
      columns: The numbers of the columns; None: all.
      where: What an error calls the stripe.

    Returns:
      For each of the columns its (events,) int64 values; those of float32 are the bits of the numbers
      (`as_floats`).

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
    """Return the int64 numbers that a stripe keeps of a column: its values, or the bits of float32."""
    if column.dtype == np.float32:
        return np.ascontiguousarray(column).view(np.uint32).astype(np.int64)
    if column.dtype != np.int64:
        raise DataError(f"stripe: a column is of int64 or float32, got {column.dtype}")
    return np.ascontiguousarray(column)
