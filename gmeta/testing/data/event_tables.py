"""Small tables of events for tests of preprocessing: drawn, written in every format, and as plain rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

SPEC = TableSpec(
    task="user",
    time="ts",
    label="click",
    columns={
        "user": ColumnSpec(dtype="int64"),
        "item": ColumnSpec(hash=True),
        "price": ColumnSpec(dtype="float32"),
        "tags": ColumnSpec(dtype="int64", is_list=True),
    },
)


def event_table(rows: int, *, users: int = 20, seed: int = 0) -> pa.Table:
    """A table that `SPEC` fits: users of very different numbers of rows, many times that tie."""
    rng = np.random.default_rng(seed)
    tags = [rng.integers(0, 50, size).tolist() for size in rng.integers(0, 4, rows)]
    return pa.table(
        {
            "user": (users * rng.random(rows) ** 3).astype(np.int64) - 3,
            "ts": rng.integers(0, max(rows // 8, 1), rows),
            "item": [f"item {number}" for number in rng.integers(0, 30, rows)],
            "price": rng.integers(0, 1000, rows) / 8,
            "tags": pa.array(tags, pa.list_(pa.int64())),
            "click": rng.integers(0, 2, rows),
            "unused": ["x"] * rows,
        }
    )


def write_table(table: pa.Table, path: Path) -> Path:
    """Write a table as its file's ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=max(table.num_rows // 3, 1))
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{_json(row)}\n" for row in table.to_pylist()))
    else:
        flat = pa.table({name: _as_text(table[name]) for name in table.column_names})
        delimiter = "\t" if path.suffix == ".tsv" else ","
        pyarrow.csv.write_csv(flat, path, pyarrow.csv.WriteOptions(delimiter=delimiter))
    return path


def shuffled(table: pa.Table, seed: int = 0) -> pa.Table:
    """The rows in another order."""
    return table.take(np.random.default_rng(seed).permutation(table.num_rows))


def parts(table: pa.Table, cuts: Sequence[int]) -> list[pa.Table]:
    """The table cut before some of its rows."""
    edges = [0, *cuts, table.num_rows]
    return [table.slice(a, b - a) for a, b in itertools.pairwise(edges)]


def _as_text(column: pa.ChunkedArray) -> Any:
    if not pa.types.is_list(column.type):
        return column
    return ["|".join(map(str, values)) for values in column.to_pylist()]


def _json(value: Any) -> str:
    import json

    return json.dumps(value)
