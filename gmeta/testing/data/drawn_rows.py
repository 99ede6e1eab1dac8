"""Hypothesis strategies for schemas and rows, with the names and values that encoders stumble over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gmeta.core.data.schema import Column, Schema

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def _encodes(text: str) -> bool:
    try:
        return "\0" not in text and bool(text.encode())
    except UnicodeEncodeError:
        return False


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Schemas of a key and up to four other columns of any kind, in any order."""
    names = draw(st.lists(st.text(min_size=1, max_size=200).filter(_encodes), max_size=4, unique=True))
    columns = [Column("task"), Column("batch_id")]
    for name in names:
        if name not in ("task", "batch_id"):
            columns.append(Column(name, draw(st.sampled_from(["int64", "float32"])), draw(st.booleans())))
    return Schema(tuple(draw(st.permutations(columns))))


@st.composite
def rows_of(draw: st.DrawFn, schema: Schema, count: int, ints: Any = INT64) -> list[list[list[Any]]]:
    """``count`` rows of a schema: for each a list of values a column; ``ints`` draws the int64 ones."""
    rows = []
    for _ in range(count):
        row = []
        for column in schema:
            values = ints if column.dtype == "int64" else FLOAT32
            row.append(draw(st.lists(values, max_size=5)) if column.is_list else [draw(values)])
        rows.append(row)
    return rows


def as_columns(schema: Schema, rows: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
    """Rows as the columns that a `RecordWriter` takes."""
    out: dict[str, Any] = {}
    for i, column in enumerate(schema):
        values = np.array([value for row in rows for value in row[i]], column.dtype)
        splits = np.cumsum([0] + [len(row[i]) for row in rows])
        out[column.name] = (values, splits) if column.is_list else values
    return out
