"""The distributed engine: it runs the plan on a Spark cluster.

::

    pass 1   records ──normalise──> rows, on disk; tally of what is bad; sample ──> bounds of the ranges
    pass 2   rows ──by range──> sort, number ──> on disk; counts ──> prefix sum over the ranges
    pass 3   rows ──batch, order_key──> by shard, sort ──native writer──> shards

A range is a contiguous part of the rows in order (task, time, then the tie-breaking columns). So the rows of
a hot task may fill several ranges, which different workers process. If keys may not repeat in a task, rows
with the same key are first brought together.

The driver handles counts, samples and manifest entries, never rows. It writes the manifest last. Workers
write shards into the staging folder, under temporary names until the shards are whole (`attempts`), so tasks
may be repeated or run twice. The folder must be on a file system that all machines see.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping
from gmeta.core.staging import stage_folder
from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.cluster import spark_rows as work
from gmeta.preprocess.cluster.attempts import collect
from gmeta.preprocess.cluster.spark_connection import FEW_CELLS, spark_errors, spark_session
from gmeta.preprocess.cluster.spark_records import FileSplit
from gmeta.preprocess.cluster.spark_tables import open_job, read_table
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.cluster.tally import Tally
from gmeta.preprocess.columns import Columns, Ints
from gmeta.preprocess.config import PrepareConfig
from gmeta.preprocess.plan.census import Census
from gmeta.preprocess.plan.numbering import Edge, RangeCount, edges
from gmeta.preprocess.plan.placement import splits
from gmeta.preprocess.plan.ranges import bounds_of
from gmeta.preprocess.progress import Progress, no_progress
from gmeta.preprocess.summary import PrepareSummary
from gmeta.preprocess.table_spec import TableSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RANGE_ROWS = 500_000
"""The number of rows in a range: each Python worker holds one range in memory."""


def prepare_on_spark(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    on_bad: str = "raise",
    *,
    spec: TableSpec,
    overwrite: bool = False,
    ranges: int | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> PrepareSummary:
    """Prepare a table on Spark; the result has the same bytes as with `gmeta.preprocess.prepare`.

    Args:
      data: Files, folders and patterns of CSV, Parquet or JSON lines that every machine sees; addresses such
        as ``hdfs://host/clicks``; or ``hive:database.table``.
      out: The folder to make, on a file system that every machine sees.
      config: The settings.
      on_bad: ``"raise"`` ends the run at bad records, ``"skip"`` counts each and leaves it out.
      spec: The description of the columns.
      overwrite: Replace a data set that was prepared with other settings or input.
      ranges: The number of ranges to sort separately. None: one for each `RANGE_ROWS` rows, and at least one
        for each core.
      master: Spark's master, such as ``local[4]`` or ``yarn``. None: as ``spark-submit`` says, or this
        machine.
      conf: Settings for a new session. An active session is used as it is.
      progress: Called at the end of each stage.

    Returns:
      A summary of what was read, kept and left out.

    Raises:
      ConfigError: A setting is out of range, or the spec doesn't fit the table.
      DataError: A record is bad, or a split has no task left.
      GmetaError: ``out`` holds something else or can't be written; Spark is missing or failed.

    Example:
      >>> prepare("hive:shop.clicks", "data/clicks", spec=TableSpec("user", time="ts"))  # doctest: +SKIP
    """
    started, out = time.perf_counter(), Path(out)
    paths = [data] if isinstance(data, str | os.PathLike) else list(data)
    if ranges is not None and not 1 <= ranges <= 999_999:
        raise ConfigError(f"ranges must be in 1..999999, got {ranges}")
    with spark_session(master, conf) as spark, spark_errors():
        job = open_job(spark, paths, out, spec, config or PrepareConfig(), on_bad, overwrite=overwrite)
        if job.is_done():
            return PrepareSummary.load(out)
        table, files = read_table(spark, job, paths[0])
        with stage_folder(out) as staging:
            summary = _run(spark, job, table, files, staging, ranges, progress)
    return replace(summary, seconds=time.perf_counter() - started)


def _run(
    spark: SparkSession,
    job: TableJob,
    table: DataFrame,
    files: Sequence[FileSplit],
    folder: Path,
    ranges: int | None,
    progress: Progress,
) -> PrepareSummary:
    from pyspark import StorageLevel

    rows = table.mapInArrow(partial(work.read, job, files), work.READ).persist(StorageLevel.DISK_ONLY)
    kept = [rows]
    try:
        tally, samples = _survey(rows)
        progress("read", tally.rows_read, tally.rows_read)
        tally.report(BadRecords(job.on_bad), job.path_of)
        spark.conf.set(*FEW_CELLS)
        parts = ranges or max(spark.sparkContext.defaultParallelism, -(-tally.rows_read // RANGE_ROWS))
        bounds = bounds_of(samples, job.spec.order, parts)
        numbered = _sort(job, rows, bounds, salts_of(spark, parts)).persist(StorageLevel.DISK_ONLY)
        kept.append(numbered)
        counts, repeated = _counts(numbered)
        tally.merge(repeated)
        census = Census(counts, job.config)
        job.check(census, tally)
        progress("sort", census.rows, census.rows)
        places = len(splits(job.config)) * job.config.shards
        pieces = -(-census.rows // (places * RANGE_ROWS))
        _write(job, numbered, folder, edges(counts), pieces, salts_of(spark, places))
    finally:
        for frame in kept:
            frame.unpersist()
    shards = collect(folder, job.spec.schema, job.config, census.of_splits())
    progress("write", census.rows, census.rows)
    return job.finish(folder, shards, census, tally)


def _survey(rows: DataFrame) -> tuple[Tally, list[tuple[int, Columns]]]:
    """Collect the tally of bad records, and the sample of every partition as (stride, rows)."""
    tally, samples = Tally(), []
    for found in rows.select("tally", "stride", "sample").where("tally is not null").collect():
        tally.merge(Tally.from_json(found["tally"]))
        if found["sample"] is not None:
            samples.append((found["stride"], work.unpack(bytes(found["sample"]))))
    return tally, samples


def _sort(job: TableJob, rows: DataFrame, bounds: Columns | None, salts: Ints) -> DataFrame:
    """Return all good rows in order and numbered, one range per partition."""
    rows = rows.select(work.ROWS)
    to_ranges = work.mark_repeated if job.spec.unique else work.assign_ranges
    if job.spec.unique:
        rows = rows.mapInArrow(partial(work.by_key, job, salts), work.RANGED)
        rows = rows.repartition(len(salts), work.SALT)
    rows = rows.mapInArrow(partial(to_ranges, job, bounds, salts), work.RANGED)
    return rows.repartition(len(salts), work.SALT).mapInArrow(partial(work.number_ranges, job), work.NUMBERED)


def _counts(rows: DataFrame) -> tuple[list[RangeCount], Tally]:
    counts, tally = [], Tally()
    for found in rows.select("count", "tally").where("tally is not null").collect():
        tally.merge(Tally.from_json(found["tally"]))
        if found["count"] is not None:
            counts.append(from_mapping(RangeCount, json.loads(found["count"])))
    return counts, tally


def _write(
    job: TableJob, rows: DataFrame, folder: Path, known: Mapping[int, Edge], pieces: int, salts: Ints
) -> None:
    rows = rows.select("range", work.ROWS).where("rows is not null")
    placed = rows.mapInArrow(partial(work.place_pieces, job, known, pieces, salts), work.PLACED)
    placed = placed.repartition(len(salts), work.SALT).sortWithinPartitions(work.PIECE)
    placed.mapInArrow(partial(work.write_shards, job, folder, pieces), work.WRITTEN).collect()


def salts_of(spark: SparkSession, partitions: int) -> Ints:
    """Find, for each partition, a number that Spark's hash sends there, to address rows to partitions."""
    found: dict[int, int] = {}
    start, step = 0, 8 * partitions + 64
    while len(found) < partitions:
        numbers = spark.range(start, start + step, numPartitions=1)
        for number, partition in numbers.selectExpr("id", f"pmod(hash(id), {partitions})").collect():
            found.setdefault(partition, number)
        start += step
    return np.array([found[number] for number in range(partitions)], np.int64)
