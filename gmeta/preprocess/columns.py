"""Rows as columns, which the plan's functions take and return, and the conversion from and to Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gmeta.core.schema import Column

Ints = NDArray[np.int64]
Ragged = tuple[NDArray[Any], Ints]
"""A column of lists, values (V,) and splits (N + 1,): row ``i`` is ``values[splits[i]:splits[i + 1]]``."""
Values: TypeAlias = "NDArray[Any] | Ragged"
Columns: TypeAlias = Mapping[str, Values]
"""Column name -> (N,) int64 or float32, or values and row splits for a list column."""

_ARROW = {"int64": pa.int64(), "float32": pa.float32()}


def gather_ragged(column: Ragged, rows: Ints) -> Ragged:
    """Gather rows of a column of lists.

    Args:
      column: Values (V,) and row splits (N + 1,).
      rows: (M,) int64, the rows in the wanted order; rows may repeat.

    Returns:
      Values and row splits (M + 1,) of these rows.

    Example:
      >>> gather_ragged((np.array([7, 8, 9]), np.array([0, 2, 3])), np.array([1, 0]))
      (array([9, 7, 8]), array([0, 1, 3]))
    """
    values, splits = column
    lengths = np.diff(splits)[rows]
    new_splits = np.concatenate(([0], np.cumsum(lengths)))
    shift = np.repeat(splits[rows] - new_splits[:-1], lengths)  # from a place in the result to one in values
    return values[shift + np.arange(new_splits[-1])], new_splits


def row_count(columns: Columns) -> int:
    """Return the number of rows of some columns."""
    first = next(iter(columns.values()))
    return len(first[1]) - 1 if isinstance(first, tuple) else len(first)


def single(columns: Columns, name: str) -> NDArray[Any]:
    """Return a column with one value per row."""
    values = columns[name]
    if isinstance(values, tuple):
        raise TypeError(f"column {name!r} holds lists")
    return values


def take(columns: Columns, rows: Ints) -> dict[str, Values]:
    """Gather rows of all columns, in the order of ``rows`` (M,)."""
    return {
        name: gather_ragged(values, rows) if isinstance(values, tuple) else values[rows]
        for name, values in columns.items()
    }


def part(columns: Columns, start: int, stop: int) -> dict[str, Values]:
    """Return rows ``start`` to ``stop - 1`` of all columns, as views except for row splits."""
    found: dict[str, Values] = {}
    for name, values in columns.items():
        if isinstance(values, tuple):
            flat, splits = values
            inside = splits[start : stop + 1]
            found[name] = flat[inside[0] : inside[-1]], inside - inside[0]
        else:
            found[name] = values[start:stop]
    return found


def join_rows(parts: Sequence[Columns]) -> dict[str, Values]:
    """Concatenate the rows of several parts, at least one."""
    if len(parts) == 1:
        return dict(parts[0])
    found: dict[str, Values] = {}
    for name, first in parts[0].items():
        if isinstance(first, tuple):
            lengths = np.concatenate([np.diff(each[name][1]) for each in parts])
            splits = np.concatenate(([0], np.cumsum(lengths)))
            found[name] = np.concatenate([each[name][0] for each in parts]), splits
        else:
            found[name] = np.concatenate([each[name] for each in parts])
    return found


def from_arrow(batch: pa.RecordBatch | pa.Table) -> dict[str, Values]:
    """Convert a batch of normalised rows, without nulls, to columns; copy only where Arrow requires it."""
    found: dict[str, Values] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            offsets = array.offsets.to_numpy().astype(np.int64)
            flat = array.values.slice(offsets[0], offsets[-1] - offsets[0])
            found[name] = flat.to_numpy(zero_copy_only=False), offsets - offsets[0]
        else:
            found[name] = array.to_numpy(zero_copy_only=False)
    return found


def to_arrow(columns: Columns) -> pa.Table:
    """Convert columns to an Arrow table: the inverse of `from_arrow`."""
    return pa.table(
        {
            name: pa.LargeListArray.from_arrays(pa.array(values[1]), pa.array(values[0]))
            if isinstance(values, tuple)
            else pa.array(values)
            for name, values in columns.items()
        }
    )


def arrow_type(column: Column) -> pa.DataType:
    """Return the Arrow type of a normalised column."""
    return pa.large_list(_ARROW[column.dtype]) if column.is_list else _ARROW[column.dtype]
