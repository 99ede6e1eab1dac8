"""The native record encoder (``io/records``): it converts columns to framed records, one block at a time."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError, NativeLibraryError
from gmeta.core.group_index import LAYOUTS, Codec, Layout, check_codec
from gmeta.core.native import FunctionTypes, load_functions
from gmeta.core.schema import Schema
from gmeta.preprocess.source import Ints

_DTYPES = ("int64", "float32")  # each index is the value in the native enum


_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: FunctionTypes = {
    "encoder_new": (_POINTER, [_NUMBER, *([_POINTER] * 3), ctypes.c_int32, _NUMBER, _NUMBER, ctypes.c_int32]),
    "encoder_free": (None, [_POINTER]),
    "has_zstd": (ctypes.c_int32, []),
    "encode_groups": (
        _NUMBER,
        [
            _POINTER,
            *(_NUMBER, _NUMBER, _POINTER, _POINTER),
            *(_NUMBER, _POINTER, _POINTER, _POINTER),
            *(_NUMBER, _POINTER, _POINTER),
        ],
    ),
}


@functools.cache
def _library() -> ctypes.CDLL:
    return load_functions("records", "gmeta_records_", _SIGNATURES)


@dataclass(frozen=True)
class GroupRuns:
    """The groups that some rows are cut into.

    Attributes:
      ends: (G,) the row before which each group ends, ascending; the last one is the number of rows.
      sizes: (G,) each group's bytes in the file; the encoder adds the bytes that it writes.
      crcs: (G,) CRC-32C of each group's joined payloads; the encoder continues it from earlier bytes.
      keys: ``(task, batch_id)`` of each group.
      continues: Whether the first group continues the group that was written last.
    """

    ends: NDArray[np.int64]
    sizes: NDArray[np.int64] | None = None
    crcs: NDArray[np.uint32] | None = None
    keys: Sequence[tuple[int, int]] = ()
    continues: bool = False


class RecordEncoder:
    """An encoder of rows in one of the layouts.

    Args:
      schema: The columns.
      layout: ``"example"``, a ``tf.train.Example`` per row, or ``"columnar"``, a record per group.
      codec: ``"zstd"`` compresses each record; only for the columnar layout.

    Raises:
      ConfigError: The codec is unknown, or doesn't exist for this layout.
      NativeLibraryError: The native encoder was never built, has another version, or finds no zstd library.
    """

    def __init__(self, schema: Schema, layout: Layout, codec: Codec | None = None) -> None:
        check_codec(codec, layout)
        if codec is not None and not _library().gmeta_records_has_zstd():
            raise NativeLibraryError(
                "codec 'zstd' needs libzstd.so.1, which isn't there: install it (Debian: apt-get install "
                "libzstd1)"
            )
        self._count = count = len(schema.columns)
        names = [column.name for column in schema]
        self._handle = _library().gmeta_records_encoder_new(
            count,
            (ctypes.c_char_p * count)(*(name.encode() for name in names)),
            (ctypes.c_int32 * count)(*(_DTYPES.index(column.dtype) for column in schema)),
            (ctypes.c_int32 * count)(*(int(column.is_list) for column in schema)),
            LAYOUTS.index(layout),
            names.index(schema.task),
            names.index(schema.batch),
            int(codec is not None),
        )
        if not self._handle:
            raise MemoryError("no memory for the record encoder")

    def blocks(
        self, values: list[NDArray[Any]], splits: list[NDArray[np.int64] | None], runs: GroupRuns, block: int
    ) -> Iterator[memoryview]:
        """Yield views of encoded bytes; each view is valid until the next one is requested.

        Args:
          values: The values of each column, contiguous and of the column's type.
          splits: Row splits of each list column, None for the others.
          runs: The groups of the rows.
          block: Bytes to encode at once; the last record of a block may exceed it.
        """
        ends = runs.ends
        value_pointers = (ctypes.c_void_p * self._count)(*(array.ctypes.data for array in values))
        split_pointers = (ctypes.c_void_p * self._count)(
            *(None if array is None else array.ctypes.data for array in splits)
        )
        data, size, first = ctypes.c_void_p(), ctypes.c_int64(), 0
        while len(ends) and first < ends[-1]:
            first = _library().gmeta_records_encode_groups(
                self._handle,
                first,
                self._count,
                value_pointers,
                split_pointers,
                len(ends),
                ends.ctypes.data,
                None if runs.sizes is None else runs.sizes.ctypes.data,
                None if runs.crcs is None else runs.crcs.ctypes.data,
                block,
                ctypes.byref(data),
                ctypes.byref(size),
            )
            if first < 0:
                raise MemoryError("no memory for a block of encoded records")
            yield memoryview((ctypes.c_char * size.value).from_address(data.value or 0)).cast("B")

    def close(self) -> None:
        """Free the native encoder; a second call does nothing."""
        if self._handle:
            _library().gmeta_records_encoder_free(self._handle)
            self._handle = None


# The check for records that readers would refuse as too large; it runs before anything is written.

MAX_RECORD = 256 << 20
"""The largest record in bytes; readers unpack no larger one (``kMaxBody`` in ``io/records/columnar.h``)."""

FRAME = 16
"""The bytes of a record that aren't payload."""

_WIDEST = 11  # bytes of the widest value in either layout
_HEADER = 1 << 16  # more bytes than the names of any columns take
_BLOCK = 4 << 20


def refuse_large(
    encoder: RecordEncoder,
    values: Sequence[NDArray[Any]],
    splits: Sequence[Ints | None],
    ends: Ints,
    key: tuple[Ints, Ints],
    path: Path | None,
) -> None:
    """Refuse records of more than `MAX_RECORD` bytes.

    An upper bound clears nearly every record; the remaining records are encoded to find their size.

    Args:
      encoder: The encoder of the records.
      values: The values of each column, as for `RecordEncoder.blocks`.
      splits: Row splits of each list column, None for the others.
      ends: (R,) the row before which each record ends.
      key: (N,) the task and the batch of each row.
      path: The path that the error names.

    Raises:
      DataError: A record is too large; the message gives its task, batch and size.
    """
    rows = len(key[0])
    widest = max((int(np.diff(of).max(initial=0)) for of in splits if of is not None), default=0)
    longest = int(np.diff(ends, prepend=0).max(initial=0))
    if longest * len(values) * max(1, 2 * widest) * _WIDEST + _HEADER <= MAX_RECORD:
        return
    bound = np.zeros(rows + 1, np.int64)  # the number of values before each row
    for of_list in splits:
        bound += np.arange(rows + 1) if of_list is None else of_list + np.arange(rows + 1)
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
    large = (bound[ends] - bound[starts]) * _WIDEST + _HEADER > MAX_RECORD
    for start, end in zip(starts[large].tolist(), ends[large].tolist(), strict=True):
        own: list[NDArray[Any]] = []
        own_splits: list[Ints | None] = []
        for array, of_list in zip(values, splits, strict=True):
            inside = None if of_list is None else np.ascontiguousarray(of_list[start : end + 1])
            own.append(array[start:end] if inside is None else array[inside[0] : inside[-1]])
            own_splits.append(None if inside is None else inside - inside[0])
        one = GroupRuns(np.array([end - start], np.int64))
        size = sum(len(block) for block in encoder.blocks(own, own_splits, one, _BLOCK)) - FRAME
        if size > MAX_RECORD:
            task, batch = (int(values[start]) for values in key)
            raise DataError(
                f"task {task}, batch {batch}: its record of {end - start:,} rows would have {size:,} bytes, "
                f"readers take {MAX_RECORD:,}",
                path=path,
                advice="cut tasks into smaller batches (--batch-rows), or leave such tasks out (--max-rows)",
            )
