"""The embedded engine: DuckDB groups the rows by task, on disk if they don't fit in memory.

::

    source ──normalise──> DuckDB's table ──ORDER BY task, time──> Cutter ──encode──> GroupSorter ──> shards

DuckDB holds the rows by column and sorts them; beyond its memory limit it writes to a temporary folder. It
sorts by task and time only: the plan breaks ties, among the few rows that tie. The second sort, of batches,
works on encoded bytes (`group_sorter`).

DuckDB's sorting time grows with the square of the number of columns, so the columns of a wide table that it
doesn't compare are stored as one column of bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gmeta.core.errors import GmetaError
from gmeta.core.settings import parse_size
from gmeta.preprocess.config import PlanConfig, Progress
from gmeta.preprocess.local.group_sorter import GroupSorter
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.outcome import refuse_empty_splits, refuse_repeated
from gmeta.preprocess.plan.ranges import Cutter
from gmeta.preprocess.source import (
    NUMBER,
    BadRecords,
    Columns,
    Ints,
    Source,
    from_arrow,
    row_count,
    single,
    to_arrow,
)
from gmeta.preprocess.table_spec import RESERVED, TableSpec
from gmeta.preprocess.tables.duckdb_text import arrow_batches, explain_errors, sql_name
from gmeta.preprocess.tables.table_scan import batch_rows

if TYPE_CHECKING:
    import duckdb

# The memory limit of a preparation.

LEAST = 512 << 20
"""The smallest limit: with less memory, the libraries leave no room to work."""

_LIBRARIES = 256 << 20  # bytes that Python, NumPy, Arrow and DuckDB take before a row is read

DUCKDB_SHARE, RUN_SHARE, MERGE_SHARE = 0.6, 0.1, 0.3
"""Shares of the remaining memory: for DuckDB, for encoded batches beside it, and for merging them afterwards.

Rows in transit and copies of the data being written take the rest.
"""

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def parse_bytes(text: str) -> int:
    """Parse a size such as ``"2GB"``, ``"512 MiB"`` or ``"1000000000"``, and return it in bytes.

    Raises:
      ConfigError: The text isn't a size, or the size is too small.
    """
    return parse_size(text, "memory limit", LEAST)


def share(limit: int, part: float) -> int:
    """Return the bytes for a part of the work, such as `DUCKDB_SHARE`, out of ``limit`` bytes in all."""
    return max(int((limit - _LIBRARIES) * part), 1)


def default_limit() -> int:
    """Return half of the memory of the machine, or of the container if that is less."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        there = min(there, int(_CGROUP.read_text()))
    return max(there // 2, LEAST)


_A_THREAD = 144 << 20  # bytes that a thread of DuckDB needs to sort beyond memory
_ROWS = 122_880  # rows that are sorted, cut and encoded at once
_COMPRESSION = 4
_WIDE = 256  # columns of a wide table
_PACKED = f"{RESERVED}packed"


def connect(memory_limit: int) -> duckdb.DuckDBPyConnection:
    """Connect to an in-memory DuckDB that takes its share of the preparation's ``memory_limit`` bytes."""
    import duckdb

    connection = duckdb.connect(":memory:")
    own = share(memory_limit, DUCKDB_SHARE)
    connection.execute(f"SET memory_limit = '{own >> 20}MiB'")
    connection.execute("SET preserve_insertion_order = true")  # a record's number gives its place in its file
    connection.execute("SET enable_progress_bar = false")
    threads = min(len(os.sched_getaffinity(0)), max(1, own // _A_THREAD))
    connection.execute(f"SET threads = {threads}")
    return connection


def sort_groups(
    source: Source,
    config: PlanConfig,
    bad: BadRecords,
    progress: Progress,
    connection: duckdb.DuckDBPyConnection,
    folder: Path,
    memory_limit: int,
) -> tuple[Ints, Ints]:
    """Read, sort and cut all rows of ``source``, and write sorted runs of encoded batches into ``folder``.

    Args:
      source: The input.
      config: The settings.
      bad: Applies the rule for bad records.
      progress: Called with the progress of the stages ``"read"`` and ``"sort"``.
      connection: The connection to DuckDB.
      folder: The folder of the runs.
      memory_limit: Bytes of memory for the whole preparation.

    Returns:
      The tasks (T,) that have good rows, ascending, and their sizes (T,).

    Raises:
      DataError: The input is bad, or a split has no task left.
      GmetaError: The disk is full, or there is too little memory.
    """
    spec = source.spec
    _refuse_no_room(source, folder, memory_limit)
    with explain_errors(source.path):
        rows = _load(source, bad, progress, connection)
        tasks, sizes = _task_sizes(source, connection) if rows else (np.zeros(0, np.int64),) * 2
        source.check(tasks, bad)
        refuse_empty_splits(tasks, sizes, config, source.path)
        cutter = Cutter(spec, config, tasks, sizes, lambda whole: refuse_repeated(whole, source, bad))
        sorter = GroupSorter(folder, spec.schema, config, share(memory_limit, RUN_SHARE))
        done = 0
        progress("sort", 0, rows)
        try:
            # If keys may not repeat, repeated keys are reported in every task, so all tasks are kept here.
            kept = plan.select_tasks(sizes, config) | bool(spec.unique)
            for part in _sort(source, connection, None if kept.all() else tasks[kept]):
                if cut := cutter.add(part):
                    sorter.add(cut)
                done += row_count(part)
                if done < rows:
                    progress("sort", done, rows)
            if cut := cutter.finish():
                sorter.add(cut)
            sorter.finish()
        finally:
            sorter.close()
        progress("sort", rows, rows)
        connection.execute("DROP TABLE rows")
    return tasks, sizes


def _refuse_no_room(source: Source, folder: Path, memory_limit: int) -> None:
    """Refuse rows that can't be held in memory and on disk together, even if DuckDB compresses them well."""
    count, free = source.count(), shutil.disk_usage(folder).free
    size = count * sum(
        4 if c.dtype == "float32" else 8 for c in source.spec.columns.values() if not c.is_list
    )
    if size > _COMPRESSION * (memory_limit + free):
        raise GmetaError(
            f"{source.path}: {count:,} rows take {size:,} bytes to sort, and there are {memory_limit:,} of "
            f"memory and {free:,} of disk: name fewer columns in --spec, or prepare on a cluster"
        )


def _load(source: Source, bad: BadRecords, progress: Progress, connection: duckdb.DuckDBPyConnection) -> int:
    """Load the rows into DuckDB's table ``rows``, and return their number."""
    insert, count, wide = connection.cursor(), 0, _packed_columns(source.spec)
    for columns in source.chunks(bad, progress):
        stored = {name: columns[name] for name in (*source.spec.columns, NUMBER)}
        if not source.spec.unique:
            del stored[NUMBER]
        insert.register("chunk", _pack(stored, wide))
        insert.execute(
            "INSERT INTO rows SELECT * FROM chunk" if count else "CREATE TABLE rows AS SELECT * FROM chunk"
        )
        insert.unregister("chunk")
        count += row_count(columns)
    return count


def _packed_columns(spec: TableSpec) -> Mapping[str, Sequence[str]]:
    """Return dtype -> the columns that are stored as bytes: none, unless the table is wide."""
    if len(spec.columns) <= _WIDE:
        return {}
    seen, found = {spec.task, *spec.presort, *spec.unique}, dict[str, list[str]]()
    for name, column in spec.columns.items():
        if name not in seen and not column.is_list:
            found.setdefault(column.dtype or "int64", []).append(name)
    return found


def _pack(rows: Columns, wide: Mapping[str, Sequence[str]]) -> pa.Table:
    """Convert rows to a table in which some columns are the bytes of their values, row by row."""
    if not wide:
        return to_arrow(rows)
    names = {name for own in wide.values() for name in own}
    rest = [
        np.stack([single(rows, name).astype(dtype, copy=False) for name in own], axis=1).view(np.uint8)
        for dtype, own in wide.items()
    ]
    data = np.concatenate(rest, axis=1)
    kind = pa.binary(data.shape[1])
    packed = pa.FixedSizeBinaryArray.from_buffers(kind, len(data), [None, pa.py_buffer(data)])
    plain = to_arrow({name: values for name, values in rows.items() if name not in names})
    return plain.append_column(_PACKED, packed.cast(pa.binary()))


def _unpack(batch: pa.RecordBatch, wide: Mapping[str, Sequence[str]]) -> Columns:
    """Convert a batch to rows: the inverse of `_pack`."""
    if not wide:
        return from_arrow(batch)
    found = from_arrow(batch.drop_columns([_PACKED]))
    data = np.frombuffer(b"".join(batch.column(_PACKED).to_pylist()), np.uint8).reshape(batch.num_rows, -1)
    place = 0
    for dtype, names in wide.items():
        stop = place + np.dtype(dtype).itemsize * len(names)
        values = np.ascontiguousarray(data[:, place:stop]).view(dtype)
        found |= zip(names, np.ascontiguousarray(values.T), strict=True)
        place = stop
    return found


def _task_sizes(source: Source, connection: duckdb.DuckDBPyConnection) -> tuple[Ints, Ints]:
    spec = source.spec
    rows = "rows"
    if spec.unique:  # rows with a repeated key don't count
        rows = f"(SELECT DISTINCT {_names((spec.task, *spec.unique))} FROM rows)"
    task = _names((spec.task,))
    found = connection.sql(f"SELECT {task} AS task, count(*) AS size FROM {rows} GROUP BY 1 ORDER BY 1")
    columns = from_arrow(found.to_arrow_table())
    return single(columns, "task"), single(columns, "size")


def _sort(source: Source, connection: duckdb.DuckDBPyConnection, tasks: Ints | None) -> Iterator[Columns]:
    """Yield the rows of ``tasks``, or of all tasks if it is None, sorted by `TableSpec.presort`."""
    spec = source.spec
    where = ""
    if tasks is not None:
        connection.register("kept", pa.table({"kept": tasks}))
        where = f"WHERE {_names((spec.task,))} IN (SELECT kept FROM kept)"
    query = f"SELECT * FROM rows {where} ORDER BY {_names(spec.presort)}"
    wide = _packed_columns(spec)
    for batch in arrow_batches(connection.sql(query), min(_ROWS, batch_rows(len(spec.columns)))):
        yield _unpack(batch, wide)


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(map(sql_name, columns))
