"""The native reader of prepared shards (``io/group_batch``) without TensorFlow: groups to columns."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gmeta.core.data_manifest import Shard
from gmeta.core.errors import DataError
from gmeta.core.group_index import LAYOUTS, GroupIndex, Layout
from gmeta.core.native import FunctionTypes, load_functions
from gmeta.core.schema import Column
from gmeta.preprocess.columns import Columns

_BYTES = 8 << 20  # groups are read until they have so many
_DTYPES = ("int64", "float32")  # each index is the value in the native enum
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: FunctionTypes = {
    "reader_new": (
        _POINTER,
        [ctypes.c_char_p, *([_NUMBER] * 3), *([_POINTER] * 2), ctypes.c_int32, _NUMBER, _NUMBER],
    ),
    "reader_free": (None, [_POINTER]),
    "read": (_NUMBER, [_POINTER, _NUMBER, _NUMBER, _POINTER]),
    "values": (_POINTER, [_POINTER, _NUMBER]),
    "problem": (ctypes.c_char_p, [_POINTER, _NUMBER, _POINTER, _POINTER]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    return load_functions("records", "gmeta_groups_", _SIGNATURES)


class Damage(NamedTuple):
    """Rows that can't be read.

    Attributes:
      message: What is wrong, with the file and the byte.
      rows: How many they are.
    """

    message: str
    rows: int


class GroupRows(NamedTuple):
    """The rows of some groups.

    Attributes:
      columns: Name -> (N,) int64 or float32: the sound rows.
      damage: What else there should be.
    """

    columns: Columns
    damage: Sequence[Damage]


def read_groups(
    path: Path, shard: Shard, layout: Layout, columns: Sequence[Column], key: tuple[str, str]
) -> Generator[GroupRows, None, None]:
    """Read a shard from its first group to its last, about 8 MB at a time.

    Args:
      path: The shard; its index lies beside it.
      shard: The manifest's entry.
      layout: How its rows are encoded.
      columns: The columns to read, of one value a row, the key's two among them.
      key: The columns of the task and of the batch.

    Raises:
      DataError: The index is damaged, or the file can't be read. Damaged groups are returned as such.
      NativeLibraryError: The native reader was never built, or has another version.
    """
    offsets = GroupIndex.load(path, check_shard=False, checksum=shard.index).groups["offset"]
    names = [column.name for column in columns]
    reader = _library().gmeta_groups_reader_new(
        os.fsencode(path),
        shard.groups,
        shard.index,
        len(columns),
        (ctypes.c_char_p * len(names))(*(name.encode() for name in names)),
        (ctypes.c_int32 * len(names))(*(_DTYPES.index(column.dtype) for column in columns)),
        LAYOUTS.index(layout),
        names.index(key[0]),
        names.index(key[1]),
    )
    if not reader:
        raise MemoryError("no memory for the reader of groups")
    try:
        first = 0
        while first < len(offsets):
            stop = max(int(np.searchsorted(offsets, offsets[first] + _BYTES)), first + 1)
            yield _read(reader, first, stop - first, columns)
            first = stop
    finally:
        _library().gmeta_groups_reader_free(reader)


def _read(reader: int, first: int, count: int, columns: Sequence[Column]) -> GroupRows:
    rows, skipped, fatal = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int32()
    problems = _library().gmeta_groups_read(reader, first, count, ctypes.byref(rows))
    if problems < 0:
        raise MemoryError("no memory for the groups of a shard")
    damage = []
    for number in range(problems):
        words = _library().gmeta_groups_problem(reader, number, ctypes.byref(skipped), ctypes.byref(fatal))
        if fatal:
            raise DataError(words.decode(errors="replace"))
        damage.append(Damage(words.decode(errors="replace"), skipped.value))
    found = {}
    for number, column in enumerate(columns):
        address = _library().gmeta_groups_values(reader, number)
        bytes_ = ctypes.string_at(address, rows.value * np.dtype(column.dtype).itemsize)
        found[column.name] = np.frombuffer(bytes_, column.dtype)
    return GroupRows(found, damage)
