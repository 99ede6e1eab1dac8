"""The native reader in plain Python: a reference for tests, and a brief definition."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from gmeta.core.group_index import Layout
from gmeta.core.schema import Schema
from gmeta.io.cuts.task_split import After, Flag
from support.reference.table import splitmix64

# The columnar layout in plain Python and NumPy, as a reference for the native code.
# ``io/records/columnar.h`` describes the layout and its reasons.

_HEADER = struct.Struct("<4sHHIIqqq")
_FLOAT, _LIST = 1, 2
_ZSTD = 1


@dataclass(frozen=True)
class ColumnarGroup:
    """A group as stored in its record.

    Attributes:
      key_names: The names of the task and batch columns.
      key: ``(task, batch_id)``.
      rows: The number of its rows.
      columns: Name of each other column -> values, or ``(values, row_splits)`` for lists.
      widths: Name of each of these -> bytes per value.
    """

    key_names: tuple[str, str]
    key: tuple[int, int]
    rows: int
    columns: dict[str, Any]
    widths: dict[str, int]


def records(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The offset and the payload of each record of a sound TFRecord file."""
    data, offset = Path(path).read_bytes(), 0
    while offset < len(data):
        (size,) = struct.unpack_from("<Q", data, offset)
        yield offset, data[offset + 12 : offset + 12 + size]
        offset += 12 + size + 4


def decode(payload: bytes) -> ColumnarGroup:
    """Read a sound payload."""
    magic, version, flags, count, schema_size, rows, task, batch = _HEADER.unpack_from(payload)
    assert (magic, version) == (b"GCOL", 1)
    if flags:
        assert flags == _ZSTD
        (size,) = struct.unpack_from("<Q", payload, _HEADER.size)
        body = pa.decompress(payload[_HEADER.size + 8 :], size, codec="zstd", asbytes=True)
        payload = payload[: _HEADER.size] + body
    schema = list(_schema(payload[_HEADER.size : _HEADER.size + schema_size]))
    at = _HEADER.size + _pad(schema_size)
    words = np.frombuffer(payload, "<u8", count, at)
    at += 8 * count

    def take(dtype: str, size: int) -> NDArray[Any]:
        nonlocal at
        array = np.frombuffer(payload, dtype, size, at)
        assert not any(payload[at + array.nbytes : at + _pad(array.nbytes)])
        at += _pad(array.nbytes)
        return array

    columns: dict[str, Any] = {}
    widths: dict[str, int] = {}
    for (kind, name), word in zip(schema[2:], words.tolist(), strict=True):
        size, length_width, width = word >> 16, word >> 8 & 255, word & 255
        lengths = take(f"<u{length_width}", rows) if kind & _LIST else None
        values = take("<f4" if kind & _FLOAT else f"<i{width}", size)
        values = values if kind & _FLOAT else values.astype(np.int64)
        splits = None if lengths is None else np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
        columns[name] = values if splits is None else (values, splits)
        widths[name] = width
    if not count:
        assert not take("<u1", rows).any()
    assert at == len(payload)
    return ColumnarGroup((schema[0][1], schema[1][1]), (task, batch), rows, columns, widths)


def crc32c(data: bytes) -> int:
    """The CRC-32C of bytes, computed one byte at a time."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


@functools.cache
def _crc_table() -> list[int]:
    def remainder(value: int) -> int:
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        return value

    return [remainder(byte) for byte in range(256)]


def _schema(data: bytes) -> Iterator[tuple[int, str]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        kind, size = varint(), varint()
        yield kind, data[at : at + size].decode()
        at += size


def _pad(size: int) -> int:
    return -(-size // 8) * 8


Row = dict[str, list[Any]]
_Item = TypeVar("_Item")
_WORD = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


def rows(files: Sequence[str], schema: Schema, layout: Layout = "example") -> Iterator[Row]:
    """The rows of files, one after another: column name -> its values."""
    if layout == "columnar":
        for file in files:
            for _, payload in records(file):
                yield from _rows(decode(payload), schema)
        return
    for record in tf.data.TFRecordDataset(list(files)).as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        yield {
            column.name: list(
                features[column.name].int64_list.value
                if column.dtype == "int64"
                else features[column.name].float_list.value
            )
            for column in schema
        }


def _rows(group: ColumnarGroup, schema: Schema) -> Iterator[Row]:
    for number in range(group.rows):
        row: Row = dict(zip(group.key_names, ([group.key[0]], [group.key[1]]), strict=True))
        for name, values in group.columns.items():
            first, end = number, number + 1
            if isinstance(values, tuple):
                values, splits = values
                first, end = splits[number], splits[number + 1]
            row[name] = values[first:end].tolist()
        yield {column.name: row[column.name] for column in schema}


def groups(files: Sequence[str], schema: Schema, layout: Layout = "example") -> list[list[Row]]:
    """Consecutive rows of equal (task, batch), file by file."""
    return [
        list(group)
        for file in files
        for _, group in itertools.groupby(
            rows([file], schema, layout), key=lambda row: (row[schema.task], row[schema.batch])
        )
    ]


class Draws:
    """The native reader's random numbers: draw i is a function of (seed, stream, i)."""

    def __init__(self, seed: tuple[int, int], stream: int) -> None:
        self._key = splitmix64(seed[0] + splitmix64(seed[1] + splitmix64(stream)))
        self._count = 0

    def below(self, n: int) -> int:
        """The next draw, uniform in [0, n)."""
        self._count += 1
        return splitmix64(self._key + self._count * _ODD) * n >> 64


def permute(items: Sequence[_Item], seed: tuple[int, int], stream: int = 0) -> list[_Item]:
    """The order of blocks, and of a window, by Fisher and Yates."""
    out, draws = list(items), Draws(seed, stream)
    for left in range(len(out), 1, -1):
        i = draws.below(left)
        out[left - 1], out[i] = out[i], out[left - 1]
    return out


def epoch_order(groups: int, window: int, seed: tuple[int, int]) -> list[int]:
    """The groups at the positions of an epoch, in the order of `gmeta.io.groups`."""
    if not window:
        return list(range(groups))
    block = max(1, window // 64)
    blocks = permute(range(-(-groups // block)), seed)
    order, at_once = list[int](), max(1, window // block)
    for number, first in enumerate(range(0, len(blocks), at_once)):
        own = [
            group
            for place in blocks[first : first + at_once]
            for group in range(place * block, min(groups, (place + 1) * block))
        ]
        order += permute(own, seed, stream=1 + number)
    return order


def row_batches(
    elements: Sequence[tuple[int, Sequence[_Item]]], batch_size: int, seed: tuple[int, int] | None
) -> list[list[_Item]]:
    """Divide rows into batches like `gmeta.io.rows`.

    Args:
      elements: (cursor, rows) of each.
      batch_size: The number of rows of a batch.
      seed: (seed, epoch); None: not shuffled.
    """
    queue = [
        row
        for cursor, rows in elements
        for row in (rows if seed is None else permute(rows, seed, stream=(1 << 63) + cursor))
    ]
    return [queue[first : first + batch_size] for first in range(0, len(queue), batch_size)]


def query_count(query: int | float, rows: int) -> int:
    """The number of a task's query rows: a count, or the nearest to a share, with one row left per side."""
    return query if isinstance(query, int) else min(max(math.floor(query * rows + 0.5), 1), rows - 1)


def drawn_order(rows: int, task: int, batch: int, seeds: Sequence[int]) -> list[int]:
    """A task's rows in the order of ``rows="random"``: by a hash of (seeds, task, batch, row), as int64."""

    def place(row: int) -> int:
        state = 0
        for value in (*seeds, task, batch, row):
            state = splitmix64(state ^ (value & _WORD))
        return state - ((state >> 63) << 64)

    return sorted(range(rows), key=place)


def task_batch(
    chosen: Sequence[list[Row]],
    schema: Schema,
    label: str | Sequence[str],
    query: int | float | After | Flag,
    *,
    support: int | None = None,
    seeds: Sequence[int] | None = None,
) -> dict[str, Any]:
    """An element of `gmeta.io.tasks` from its groups, as nested lists, with all columns as features.

    Args:
      chosen: The element's groups.
      schema: Their columns.
      label: One column, or several.
      query: As in `gmeta.io.tasks`.
      support: As in `gmeta.io.tasks`.
      seeds: The seeds of drawn rows: (seed, epoch) with ``resample``, (seed,) with ``rows="random"``.
    """
    flat = [row for group in chosen for row in group]
    sides: tuple[list[list[int]], list[list[int]]] = ([], [])
    start = 0
    for group in chosen:
        places = list(range(len(group)))
        if isinstance(query, After | Flag):
            values = [row[query.column][0] for row in group]
            after = [v >= query.time if isinstance(query, After) else v != 0 for v in values]
            count = sum(after)
            places.sort(key=lambda place, after=after: after[place])  # type: ignore[misc]
        else:
            count = query_count(query, len(group))
            if seeds is not None:
                key = group[0][schema.task][0], group[0][schema.batch][0]
                places = drawn_order(len(group), *key, seeds)
        before = [start + place for place in places[: len(group) - count]]
        sides[0].append(before if support is None else before[-support:])
        sides[1].append([start + place for place in places[len(group) - count :]])
        start += len(group)

    def padded(index: list[list[int]]) -> dict[str, Any]:
        length = max(map(len, index))
        return {
            "index": [line + [0] * (length - len(line)) for line in index],
            "mask": [[1.0] * len(line) + [0.0] * (length - len(line)) for line in index],
        }

    def labels(row: Row) -> Any:
        return float(row[label][0]) if isinstance(label, str) else [float(row[name][0]) for name in label]

    return {
        "features": {c.name: [row[c.name] if c.is_list else row[c.name][0] for row in flat] for c in schema},
        "label": [labels(row) for row in flat],
        "task": [group[0][schema.task][0] for group in chosen],
        "support": padded(sides[0]),
        "query": padded(sides[1]),
    }
