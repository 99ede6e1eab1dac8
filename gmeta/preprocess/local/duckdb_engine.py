"""The embedded engine: DuckDB brings the tasks together, out of core where they don't fit in memory.

::

    source ──normalise──> DuckDB's table ──ORDER BY task, time──> Cutter ──encode──> GroupSorter ──> shards

DuckDB holds the rows, by column, and sorts them; beyond its limit it writes to a temporary folder. What it
sorts by is the task and the time alone: ties are broken by the plan, on the few rows that tie. The second
sort, of batches, is of bytes that are encoded already (`group_sorter`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.columns import Columns, Ints, from_arrow, row_count, single, to_arrow
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.local import memory
from gmeta.preprocess.local.group_sorter import GroupSorter
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.cutter import Cutter
from gmeta.preprocess.plan.outcome import refuse_empty_splits, refuse_repeated
from gmeta.preprocess.progress import Progress
from gmeta.preprocess.source import NUMBER, Source
from gmeta.preprocess.tables.duckdb_text import arrow_batches, explain_errors, sql_name

if TYPE_CHECKING:
    import duckdb

_A_THREAD = 144 << 20  # bytes that a thread of DuckDB needs to sort beyond memory
_ROWS = 122_880  # rows that are sorted, cut and encoded at once


def connect(memory_limit: int) -> duckdb.DuckDBPyConnection:
    """DuckDB in memory, as one part of a preparation that is to keep to ``memory_limit`` bytes in all."""
    import duckdb

    connection = duckdb.connect(":memory:")
    own = memory.share(memory_limit, memory.DUCKDB_SHARE)
    connection.execute(f"SET memory_limit = '{own >> 20}MiB'")
    connection.execute("SET preserve_insertion_order = true")  # of files: a record is found by its number
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
    """Read, sort and cut all rows of ``source``, and leave sorted runs of encoded batches in ``folder``.

    Args:
      source: What to read.
      config: The settings.
      bad: Applies the rule for bad records.
      progress: Is told of the stages ``"read"`` and ``"sort"``.
      connection: DuckDB.
      folder: Where runs go.
      memory_limit: Bytes that the whole preparation is to keep to.

    Returns:
      The tasks (T,) that have good rows, ascending, and their sizes (T,).

    Raises:
      DataError: The input is bad, or a split has no task left.
      GmetaError: The disk is full, or there is too little memory.
    """
    spec = source.spec
    with explain_errors(source.path):
        rows = _load(source, bad, progress, connection)
        tasks, sizes = _task_sizes(source, connection) if rows else (np.zeros(0, np.int64),) * 2
        source.check(tasks, bad)
        refuse_empty_splits(tasks, sizes, config, source.path)
        cutter = Cutter(spec, config, tasks, sizes, lambda whole: refuse_repeated(whole, source, bad))
        sorter = GroupSorter(folder, spec.schema, config, memory.share(memory_limit, memory.RUN_SHARE))
        done = 0
        progress("sort", 0, rows)
        try:
            # Where keys may not repeat, those that do are told of in every task.
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


def _load(source: Source, bad: BadRecords, progress: Progress, connection: duckdb.DuckDBPyConnection) -> int:
    """Bring the rows into DuckDB's table ``rows``; returns how many."""
    insert, count = connection.cursor(), 0
    for columns in source.chunks(bad, progress):
        stored = {name: columns[name] for name in (*source.spec.columns, NUMBER)}
        if not source.spec.unique:
            del stored[NUMBER]
        insert.register("chunk", to_arrow(stored))
        insert.execute(
            "INSERT INTO rows SELECT * FROM chunk" if count else "CREATE TABLE rows AS SELECT * FROM chunk"
        )
        insert.unregister("chunk")
        count += row_count(columns)
    return count


def _task_sizes(source: Source, connection: duckdb.DuckDBPyConnection) -> tuple[Ints, Ints]:
    spec = source.spec
    rows = "rows"
    if spec.unique:  # what is repeated doesn't count
        rows = f"(SELECT DISTINCT {_names((spec.task, *spec.unique))} FROM rows)"
    task = _names((spec.task,))
    found = connection.sql(f"SELECT {task} AS task, count(*) AS size FROM {rows} GROUP BY 1 ORDER BY 1")
    columns = from_arrow(found.to_arrow_table())
    return single(columns, "task"), single(columns, "size")


def _sort(source: Source, connection: duckdb.DuckDBPyConnection, tasks: Ints | None) -> Iterator[Columns]:
    """The rows, sorted by `TableSpec.presort`; of some tasks, or of all."""
    spec = source.spec
    where = ""
    if tasks is not None:
        connection.register("kept", pa.table({"kept": tasks}))
        where = f"WHERE {_names((spec.task,))} IN (SELECT kept FROM kept)"
    query = f"SELECT * FROM rows {where} ORDER BY {_names(spec.presort)}"
    for batch in arrow_batches(connection.sql(query), _ROWS):
        yield from_arrow(batch)


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(map(sql_name, columns))
