"""Appends events of tables and of prepared data sets to a store of histories, in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from gmeta.core.data.history_manifest import current_generation
from gmeta.core.data.on_bad import check_on_bad
from gmeta.core.errors import DataError
from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.history.append_plan import (
    append_shard,
    choose_spec,
    event_words,
    finish_append,
    plan_append,
    refuse_known,
)
from gmeta.preprocess.history.append_summary import AppendSummary
from gmeta.preprocess.history.files.event_spill import EventSpill
from gmeta.preprocess.history.files.generation import new_generation, settle_or_warn
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.local import duckdb_engine, memory
from gmeta.preprocess.progress import Progress, no_progress
from gmeta.preprocess.tables.file_digests import refuse_equal
from gmeta.preprocess.tables.prepared_source import PreparedSource, is_prepared
from gmeta.preprocess.tables.table_files import holds_records
from gmeta.preprocess.tables.table_source import TableSource

Data = str | os.PathLike[str]


def append_history(
    store: Data,
    data: Data | Sequence[Data],
    spec: HistorySpec | None = None,
    *,
    watermark: int | None = None,
    on_bad: str = "raise",
    memory_limit: int | None = None,
    progress: Progress = no_progress,
) -> AppendSummary:
    """Append events to a store of histories, as its next generation.

    Events are divided by user, ordered by time, and written as new stripes; an index names them beside those
    of earlier generations, whose files stay as they are. The new events are born in this generation, so the
    histories of earlier generations can be rebuilt from this one, whatever arrives late. Equal events are all
    kept, but a file that an earlier append has read is refused, and so are two equal files. The order of the
    input doesn't matter: events of one user and one time are in the order of their columns' values.

    Args:
      store: The store's folder; it is made by the first append.
      data: Files, folders or patterns of CSV, Parquet or JSON lines; or prepared data sets, or splits of
        them such as ``"clicks/train"``, whose rows are events.
      spec: The description of the columns; the first append of tables needs it. None: what the first append
        was given, or for the first append the task and the time of a prepared data set, and all its columns.
      watermark: A time before which no more events are expected. None: behind the latest event so far.
      on_bad: ``"raise"`` ends the run at the first bad record; ``"skip"`` counts each and leaves it out.
      memory_limit: Bytes of memory for reading. None: half of the available memory. A shard's new events must
        fit in memory besides.
      progress: Called with the progress of the stages ``"read"`` and ``"write"``.

    Returns:
      What was done.

    Raises:
      ConfigError: There is no spec, or it isn't the store's; or it doesn't fit the table; or the watermark
        would go back.
      DataError: A file can't be read, a record is bad, an append has read the file before, two files with
        records are equal, or the store is damaged.
      GmetaError: The store can't be written, or another process writes to it.

    Example:
      >>> spec = HistorySpec("user", "ts")
      >>> append_history("histories", "day-1/*.parquet", spec).generation  # doctest: +SKIP
      1
      >>> append_history("histories", "day-2/*.parquet").generation  # doctest: +SKIP
      2
    """
    started, store, bad = time.perf_counter(), Path(store), BadRecords(check_on_bad(on_bad))
    settle_or_warn(store)
    files = [data] if isinstance(data, str | os.PathLike) else list(data)
    prepared = any(map(is_prepared, files))
    if spec is None and prepared and not current_generation(store):
        spec = HistorySpec.of_prepared(files[0])
    chosen = choose_spec(store, spec)
    with closing(duckdb_engine.connect(memory_limit or memory.default_limit())) as connection:
        source = (
            PreparedSource(files, chosen.table())
            if prepared
            else TableSource(files, chosen.table(), connection)
        )
        paths = [file.path for file in source.files]
        refuse_equal(paths, lambda path: prepared or holds_records(path, chosen.csv))
        plan = plan_append(store, chosen, source.spec, watermark)
        with new_generation(store, plan.before) as (_, folder):
            spill = EventSpill(folder, len(plan.spec.all_columns), plan.spec.shards)
            source.start_digests()
            for rows in source.chunks(bad, progress):
                spill.add(event_words(plan.spec, rows))
            if not spill.events:
                raise DataError("every record in it is bad", path=source.path)
            inputs = source.digests()
            refuse_known(store, inputs, [] if prepared else paths, chosen.csv)
            before, shards, done = plan.open_before(), [], 0
            for number in range(plan.spec.shards):
                shards.append(append_shard(plan, before, folder, number, spill.take(number)))
                done += shards[-1].events
                progress("write", done, spill.events)
            manifest = finish_append(plan, folder, shards, inputs)
    return AppendSummary.of(manifest, spill.events, sum(bad.counts.values()), started)
