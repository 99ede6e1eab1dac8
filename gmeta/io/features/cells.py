"""The encoding of a value in a store: the numbers of the column's type one after the other, nothing else.

A single value is 8 bytes (int64) or 4 bytes (float32), little-endian unless stated otherwise. A list is its
values one after the other, so an empty list is no bytes. ``numpy.ndarray.tobytes`` writes this format, and
``java.nio.ByteBuffer`` reads it. A missing value has no cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.data.schema import Column
from gmeta.core.errors import DataError

ByteOrder = Literal["little", "big"]
Cell = bytes | None


def arrow_type(column: Column) -> Any:
    """Return the Arrow type of a column's values: ``int64``, ``float``, or a list of one of them."""
    item = pa.int64() if column.dtype == "int64" else pa.float32()
    return pa.list_(item) if column.is_list else item


def arrow_schema(columns: Sequence[Column]) -> Any:
    """Return the Arrow schema of rows of these columns; every value may be null."""
    return pa.schema([pa.field(column.name, arrow_type(column)) for column in columns])


def column_of(name: str, kind: Any) -> Column:
    """Return the column that an Arrow type stands for.

    Raises:
      DataError: The type is neither int64 nor float32 nor a list of them.
    """
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    item = kind.value_type if is_list else kind
    if item == pa.int64():
        return Column(name, "int64", is_list)
    if item == pa.float32():
        return Column(name, "float32", is_list)
    raise DataError(f"column {name!r} is of type {kind}; int64, float (32 bits) and lists of them are stored")


def encode(array: Any, order: ByteOrder = "little") -> list[Cell]:
    """Encode an Arrow array as cells; null becomes None."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_list(array.type):
        starts = array.offsets.to_numpy().tolist()
        numbers = array.values.to_numpy(zero_copy_only=False)
    else:
        starts = range(len(array) + 1)
        numbers = array.fill_null(0).to_numpy(zero_copy_only=False)
    width, data = numbers.itemsize, numbers.astype(_dtype(numbers.dtype.name, order)).tobytes()
    return [
        data[width * starts[row] : width * starts[row + 1]] if there else None
        for row, there in enumerate(valid.tolist())
    ]


def decode(
    cells: Sequence[Sequence[Cell]],
    columns: Sequence[Column],
    keys: npt.NDArray[np.int64],
    where: str,
    order: ByteOrder = "little",
) -> Any:
    """Decode cells into rows, a RecordBatch; None becomes null.

    Args:
      cells: For each column, the cells of the keys.
      columns: The columns.
      keys: The keys of the rows, for the error.
      where: The store and the table, for the error.
      order: The order of the bytes.

    Raises:
      DataError: A cell doesn't have the size of its type.
    """
    arrays = []
    for column, own in zip(columns, cells, strict=True):
        try:
            arrays.append(_decode(own, column, keys, order))
        except DataError as error:
            advice = "declare the columns as they were written"
            raise DataError(str(error), path=where, advice=advice) from error
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _decode(cells: Sequence[Cell], column: Column, keys: npt.NDArray[np.int64], order: ByteOrder) -> Any:
    lengths = np.fromiter((-1 if cell is None else len(cell) for cell in cells), np.int64, len(cells))
    there = lengths >= 0
    dtype = _dtype(column.dtype, order)
    wrong = there & ((lengths % dtype.itemsize != 0) if column.is_list else (lengths != dtype.itemsize))
    if wrong.any():
        row = int(wrong.argmax())
        whole = "a list has a multiple of" if column.is_list else "there should be"
        raise DataError(
            f"key {keys[row]} has {lengths[row]} bytes in column {column.name!r}; of {column.dtype} {whole} "
            f"{dtype.itemsize}"
        )
    data = b"".join([cell for cell in cells if cell is not None])
    numbers = np.frombuffer(data, dtype).astype(column.dtype, copy=False)
    if column.is_list:
        return list_array(numbers, np.where(there, lengths, 0) // dtype.itemsize, there)
    values = np.zeros(len(cells), column.dtype)
    values[there] = numbers
    return pa.array(values, mask=~there)


def list_array(numbers: npt.NDArray[Any], lengths: npt.NDArray[Any], there: npt.NDArray[np.bool_]) -> Any:
    """Create an Arrow array of lists from their joined numbers, their lengths, and which aren't null."""
    offsets = np.fromiter(accumulate(lengths.tolist(), initial=0), np.int32, len(lengths) + 1)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbers), mask=pa.array(~there))


def _dtype(name: str, order: ByteOrder) -> np.dtype[Any]:
    return np.dtype(name).newbyteorder("<" if order == "little" else ">")
