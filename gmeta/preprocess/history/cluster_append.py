"""An append by many workers: the description that each worker reads, the shards that they write, and Spark.

Workers may be killed, repeated, or run twice at once: each writes into a separate folder and renames complete
files (`gmeta.preprocess.cluster.table_job`). They all write the same bytes. On Spark (for Hadoop Streaming
see `gmeta.preprocess.history.streaming_append`)::

    records ──normalise──> rows ──by shard──> on disk; tally of bad records ──> shard by shard, write

The driver handles tallies and manifest entries, never events. It holds the store's lock, writes the manifest
last, and then moves the store to the new generation.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.event_file import is_event_file
from gmeta.core.history_manifest import HistoryManifest, shard_files, user_shards
from gmeta.core.schema import check_on_bad
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.preprocess.cluster.spark_engine import FEW_CELLS, salts_of, spark_errors, spark_session
from gmeta.preprocess.cluster.spark_rows import (
    ROWS,
    SALT,
    Batches,
    FileSplit,
    cells,
    gather,
    good_rows_of,
    numbered_parcels,
    parcels_of,
    unpack,
)
from gmeta.preprocess.cluster.spark_tables import kind_of, open_table, read_table
from gmeta.preprocess.cluster.table_input import FoundTable, TableInput, Tally
from gmeta.preprocess.cluster.table_job import ATTEMPTS, own_folder
from gmeta.preprocess.config import Progress, no_progress
from gmeta.preprocess.history.append import (
    AppendPlan,
    AppendSummary,
    NewShard,
    append_shard,
    choose_spec,
    event_words,
    finish_append,
    plan_append,
    refuse_known,
)
from gmeta.preprocess.history.generation import Generation, new_generation, settle_or_warn
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.source import BadRecords, Columns, Ints, join_rows, single
from gmeta.preprocess.tables.prepared_source import is_prepared
from gmeta.preprocess.tables.table_files import holds_records, refuse_equal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class AppendJob(TableInput):
    """The description of an append: its input, and its effects on the store.

    Attributes:
      plan: The plan of the append.
      inputs: The files that are read -> their digests.
    """

    plan: AppendPlan
    inputs: Mapping[str, str]

    @classmethod
    def of_table(
        cls, table: FoundTable, store: Path, spec: HistorySpec, watermark: int | None, on_bad: str
    ) -> AppendJob:
        """Make the job that appends a table's events.

        Args:
          table: The table.
          store: The store's folder.
          spec: What `choose_spec` returned.
          watermark: The requested watermark; None: after the latest event.
          on_bad: The rule for bad records.

        Raises:
          ConfigError: The spec isn't the store's, or the watermark would decrease.
          DataError: An earlier append has read a file, or two files with records are equal.
        """
        rule = check_on_bad(on_bad)
        plan = plan_append(store, spec, table.spec, watermark)
        paths = [Path(file.path) for file in table.files] if table.bytes else []
        refuse_equal(paths, lambda path: holds_records(path, spec.csv))
        refuse_known(store, table.inputs, paths, spec.csv)
        return cls(table.name, table.spec, rule, table.files, plan, table.inputs)

    def shards_of(self, rows: Columns) -> Ints:
        """Return the shard of each event, (N,).

        Raises:
          DataError: An event's time is too late for any history.
        """
        words = event_words(self.plan.spec, rows)
        return user_shards(words[:, 0], self.plan.spec.shards)


def refuse_prepared(data: Sequence[str | os.PathLike[str]]) -> None:
    """Refuse prepared data sets and files of events, which workers of a cluster don't read.

    Raises:
      ConfigError: One of the inputs is one of them.
    """
    for path in data:
        if is_event_file(path):
            raise ConfigError(f"{path} has events of a store: append it with --engine duckdb")
        if is_prepared(path):
            raise ConfigError(f"{path} is a prepared data set: append it with --engine duckdb")


class ShardAppender:
    """A worker that writes shards of an append.

    Args:
      job: The append.
      folder: The folder of all shards, the same for every worker.
      attempt: A name of the attempt for people who look into the folder; it needn't be unique.
    """

    def __init__(self, job: AppendJob, folder: Path, attempt: str) -> None:
        self._job, self._folder, self._attempt = job, folder, attempt
        self._before: Generation | None = job.plan.open_before()

    def write(self, number: int, parts: Iterable[Columns]) -> NewShard:
        """Write a shard and its index, safely while other attempts write the same shard.

        Args:
          number: The shard's number.
          parts: All its events, in any order and cut anywhere.

        Raises:
          DataError: The store's shard is damaged.
          OSError: The file can't be written.
        """
        plan = self._job.plan
        held = [part for part in parts if len(single(part, plan.spec.user))]
        empty = np.empty((0, len(plan.spec.all_columns)), np.int64)
        words = event_words(plan.spec, join_rows(held)) if held else empty
        with own_folder(self._folder, self._attempt) as own:
            shard = append_shard(plan, self._before, own, number, words)
            for path, final in zip(shard_files(own, number), shard_files(self._folder, number), strict=True):
                path.replace(final)
        return shard


def finish_generation(
    job: AppendJob, folder: Path, written: Mapping[int, NewShard], tally: Tally
) -> HistoryManifest:
    """Check that no event is missing, and write the shards without new events and the manifest.

    Args:
      job: The append.
      folder: The generation's folder, with the shards that workers wrote.
      written: Shard -> its entry.
      tally: The tally of all records.

    Raises:
      DataError: A record is bad, and the rule is ``"raise"``; or all records are bad.
      GmetaError: Events were lost.
    """
    events = sum(shard.events for shard in written.values())
    job.check_rows(events, tally)
    if not events:
        raise DataError("every record in it is bad", path=job.path_of(0))
    appender = ShardAppender(job, folder, "empty")
    numbers = range(job.plan.spec.shards)
    shards = [written[n] if n in written else appender.write(n, ()) for n in numbers]
    return finish_append(job.plan, folder, shards, job.inputs)


SHARD = "shard"
READ = "tally string, salt bigint, shard bigint, rows binary"
WRITTEN = "shard bigint, entry string"
"""The columns that the functions for workers yield, in Spark's notation."""

_MOST_PARTITIONS = 2048


def append_history_on_spark(
    store: str | os.PathLike[str],
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    spec: HistorySpec | None = None,
    *,
    watermark: int | None = None,
    on_bad: str = "raise",
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> AppendSummary:
    """Append events to a store on Spark; the files have the same bytes as with `append_history`.

    Args:
      store: The store's folder, on a file system that every machine sees.
      data: Files, folders and patterns of CSV, Parquet or JSON lines that every machine sees; addresses such
        as ``hdfs://host/clicks``; or ``hive:database.table``.
      spec: The description of the columns; the first append requires it. None: that of the first append.
      watermark: A time before which no more events are expected. None: after the latest event so far.
      on_bad: ``"raise"`` ends the run at bad records, ``"skip"`` counts each and leaves it out.
      master: Spark's master, such as ``local[4]`` or ``yarn``. None: that of ``spark-submit``, or this
        machine.
      conf: Settings for a new session. An active session is used unchanged.
      progress: Called at the end of each stage.

    Returns:
      A summary of the append.

    Raises:
      ConfigError: There is no spec, it isn't the store's or doesn't fit the table, or the watermark would
        decrease.
      DataError: A record is bad, an append has read a file before, or the store is damaged.
      GmetaError: The store can't be written, another process writes to it, or Spark is missing or failed.

    Example:
      >>> append_history_on_spark("histories", "hive:shop.clicks")  # doctest: +SKIP
    """
    started, store = time.perf_counter(), Path(store).absolute()  # workers may run in another folder
    paths = [data] if isinstance(data, str | os.PathLike) else list(data)
    refuse_prepared(paths)
    settle_or_warn(store)
    chosen = choose_spec(store, spec)
    with spark_session(master, conf) as spark, spark_errors():
        table = open_table(spark, paths, chosen.table())
        if kind_of(paths) != "file":  # a size and a time identify a file only at this address
            stamps = {file: f"{file} of size and time {stamp}" for file, stamp in table.inputs.items()}
            table = table._replace(inputs=stamps)
        job = AppendJob.of_table(table, store, chosen, watermark, on_bad)
        frame, splits = read_table(spark, job, paths[0])
        with new_generation(store, job.plan.before) as (_, folder):
            tally, written = _run(spark, job, frame, splits, folder, progress)
            manifest = finish_generation(job, folder, written, tally)
            shutil.rmtree(folder / ATTEMPTS, ignore_errors=True)
    events = sum(shard.events for shard in written.values())
    return AppendSummary.of(manifest, events, tally.bad, started)


def _run(
    spark: SparkSession,
    job: AppendJob,
    table: DataFrame,
    splits: Sequence[FileSplit],
    folder: Path,
    progress: Progress,
) -> tuple[Tally, dict[int, NewShard]]:
    """Write the shards that have events; return the tally, and the entry of each."""
    from pyspark import StorageLevel

    salts, tally = salts_of(spark, min(job.plan.spec.shards, _MOST_PARTITIONS)), Tally()
    rows = table.mapInArrow(partial(send_to_shards, job, splits, salts), READ).persist(StorageLevel.DISK_ONLY)
    try:
        for found in rows.select("tally").where("tally is not null").collect():
            tally.merge(Tally.from_json(found["tally"]))
        progress("read", tally.rows_read, tally.rows_read)
        tally.report(BadRecords(job.on_bad), job.path_of)
        spark.conf.set(*FEW_CELLS)
        events = rows.select(SALT, SHARD, ROWS).where("rows is not null")
        events = events.repartition(len(salts), SALT).sortWithinPartitions(SHARD)
        entries = events.mapInArrow(partial(write_shards, job, folder), WRITTEN).collect()
    finally:
        rows.unpersist()
    written = {found[SHARD]: from_mapping(NewShard, json.loads(found["entry"])) for found in entries}
    progress("write", tally.rows_read - tally.bad, tally.rows_read - tally.bad)
    return tally, written


def send_to_shards(job: AppendJob, splits: Sequence[FileSplit], salts: Ints, batches: Batches) -> Batches:
    """Yield the good rows of a partition, by shard, then its tally."""
    tally = Tally()
    for rows in gather(rows for _, rows in good_rows_of(job, splits, batches, tally)):
        for number, parcel in parcels_of(job.shards_of(rows), rows):
            yield cells(READ, None, int(salts[number % len(salts)]), number, parcel)
    yield cells(READ, tally.to_json(), None, None, None)


def write_shards(job: AppendJob, folder: Path, batches: Batches) -> Batches:
    """Write shards whose rows arrive one shard after another, and yield the entry of each as JSON."""
    appender = ShardAppender(job, folder, f"spark-{uuid.uuid4().hex[:8]}")
    parcels = (one for batch in batches for one in numbered_parcels(batch, SHARD))

    def rows(found: Iterator[tuple[int, object]]) -> Iterator[Columns]:
        return (unpack(parcel) for _, parcel in found)

    for number, found in itertools.groupby(parcels, key=lambda one: one[0]):
        yield cells(WRITTEN, number, json.dumps(to_mapping(appender.write(number, rows(found)))))
