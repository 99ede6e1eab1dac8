"""The formats in which exported tables and deltas hold rows: float32, bfloat16, or int8 with a scale a row.

TensorFlow's mutable hash tables hold values of float32, int32 and a few other dtypes, but none of 8 or 16
bits. So a row of another format is packed in 32-bit words::

    int8       a word with the scale (float32), then four numbers a word
    bfloat16   two numbers a word

The last word is padded with zeros. A row of 64 numbers has 256 bytes as float32, 128 as bfloat16, and 68 as
int8. `gmeta.ops.table.portable_tables` unpacks rows by TensorFlow's own ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError

RowDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[Any]

ABSENT = 0x7FC07FC0
"""A word that no finite row begins with: as a scale it is NaN, and as two bfloat16 numbers both are."""

MOST = 127
TINY = np.finfo(np.float32).tiny
LARGEST_SCALE = np.nextafter(
    np.finfo(np.float32).max / np.float32(MOST), np.float32(0)
)  # times 127 is finite
_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)
_ROWS_AT_A_TIME = 65536


@dataclass(frozen=True)
class RowFormat:
    """How rows of a width are held.

    Args:
      dtype: ``"int8"``: each number x of a row becomes ``q = round(x / scale)``, rounded half to even, with
        ``scale = max(|row|) / 127``, and is read as ``q * scale``, both in float32. The error of a number is
        at most ``max(|row|) / 254``. A row whose scale is below 2^-126 (subnormal) is read as zeros.
        ``"bfloat16"``: the nearest bfloat16, of ties the even one; at most the largest finite number.
      dim: The width of a row.

    Raises:
      ConfigError: Another dtype.

    Example:
      >>> RowFormat("int8", 3).encode(np.float32([[127, -63.5, 2.5]])).view(np.int8)[0, 4:]
      array([127, -64,   2,   0], dtype=int8)
    """

    dtype: RowDtype
    dim: int

    def __post_init__(self) -> None:
        if self.dtype not in get_args(RowDtype):
            raise ConfigError(f"rows must be {', '.join(get_args(RowDtype))}, got dtype={self.dtype!r}")

    @property
    def width(self) -> int:
        """The number of 32-bit words of a row."""
        if self.dtype == "float32":
            return self.dim
        return -(-self.dim // 2) if self.dtype == "bfloat16" else 1 + -(-self.dim // 4)

    @property
    def kind(self) -> type[np.float32] | type[np.int32]:
        """The dtype of a word."""
        return np.float32 if self.dtype == "float32" else np.int32

    def encode(self, rows: Floats) -> Words:
        """Pack (n, dim) finite float32 rows into (n, width) words of `kind`."""
        if self.dtype == "float32":
            return rows
        words = np.zeros((len(rows), self.width), np.int32)
        pack = _pack_bfloat16 if self.dtype == "bfloat16" else _pack_int8
        for first in range(0, len(rows), _ROWS_AT_A_TIME):
            part = slice(first, first + _ROWS_AT_A_TIME)
            pack(np.ascontiguousarray(rows[part], np.float32), words[part])
        return words


def _pack_int8(rows: Floats, words: Words) -> None:
    scales = np.abs(rows).max(axis=1, initial=0, keepdims=True) / np.float32(MOST)
    scales = np.minimum(scales, LARGEST_SCALE)
    scales[scales < TINY] = 0  # a server may flush subnormal numbers to zero
    numbers = np.rint(rows / np.where(scales > 0, scales, np.float32(np.inf)))
    words[:, :1] = scales.view(np.int32)
    words[:, 1:].view(np.int8)[:, : rows.shape[1]] = np.clip(numbers, -MOST, MOST)


def _pack_bfloat16(rows: Floats, words: Words) -> None:
    bits = rows.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    sign = bits & np.uint32(0x80000000)
    rounded = np.minimum(rounded & np.uint32(0x7FFFFFFF), _LARGEST_BFLOAT16 | np.uint32(0xFFFF)) | sign
    words.view(np.uint16)[:, : rows.shape[1]] = rounded >> np.uint32(16)
