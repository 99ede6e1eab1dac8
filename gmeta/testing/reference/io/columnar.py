"""What the columnar layout is, in plain Python and NumPy: what tests compare the native code with.

``io/records/columnar.h`` draws the layout and says why it is so.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_HEADER = struct.Struct("<4sHHIIqqq")
_FLOAT, _LIST = 1, 2
_ZSTD = 1


@dataclass(frozen=True)
class ColumnarGroup:
    """A group as its record holds it.

    Attributes:
      key_names: The names of the task and batch columns.
      key: ``(task, batch_id)``.
      rows: How many rows it has.
      columns: Of each other column, name -> values, or ``(values, row_splits)`` for lists.
      widths: Of each of these, name -> bytes a value.
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
    """The CRC-32C of some bytes, one byte after another."""
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
