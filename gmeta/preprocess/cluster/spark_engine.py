"""The distributed engine: it runs the plan on a Spark cluster.

::

    pass 1   records ──normalise──> rows, on disk; tally of bad records; sample ──> bounds of the ranges;
                                    texts, in the staging folder
    pass 2   rows ──by range──> sort, number ──> on disk; counts ──> prefix sum over the ranges
    pass 3   rows ──batch, order_key──> by shard, sort ──native writer──> shards

A range is a contiguous part of the rows in order (task, time, then the tie-breaking columns). So the rows of
a hot task may fill several ranges, which different workers process. If keys may not repeat in a task, rows
with the same key are first brought together.

The driver handles counts, samples and manifest entries, never rows. It writes the manifest last. Workers
write shards into the staging folder, under temporary names until the shards are whole (`table_job`), so tasks
may be repeated or run twice. The folder must be on a file system that all machines see.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gmeta.core import errors
from gmeta.core.errors import ConfigError, GmetaError
from gmeta.core.files import stage_folder
from gmeta.core.settings import from_mapping
from gmeta.preprocess.cluster import spark_rows as work
from gmeta.preprocess.cluster.spark_rows import FileSplit
from gmeta.preprocess.cluster.spark_tables import open_job, read_table
from gmeta.preprocess.cluster.table_input import Tally
from gmeta.preprocess.cluster.table_job import TableJob, collect
from gmeta.preprocess.config import PrepareConfig, Progress, no_progress
from gmeta.preprocess.plan.outcome import Census
from gmeta.preprocess.plan.placement import splits
from gmeta.preprocess.plan.ranges import Edge, RangeCount, bounds_of, edges
from gmeta.preprocess.source import BadRecords, Columns, Ints
from gmeta.preprocess.summary import PrepareSummary
from gmeta.preprocess.table_spec import TableSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A Spark session with checks for Java, the right Python for workers, and one-line errors.

_CELLS = "spark.sql.execution.arrow.maxRecordsPerBatch"
FEW_CELLS = _CELLS, "16"
"""The setting for tables with cells of several megabytes: Arrow batches must stay within 2 GB each."""

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",  # times without a zone are UTC, as in the other engines
    _CELLS: "65536",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}
_LOCAL = {  # a machine may be unreachable under its own name
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@contextmanager
def spark_session(master: str | None = None, conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Provide the active session, or a new one that is stopped at the end.

    Args:
      master: Spark's master. None: that of ``spark-submit`` or Spark's files, otherwise this machine.
      conf: More settings for a new session.

    Raises:
      GmetaError: pyspark or Java is missing, or the session can't start.
    """
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise GmetaError(f"--engine spark needs pyspark: pip install 'gmeta[spark]' ({error})") from error
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise GmetaError("--engine spark needs Java 17: install it, or set JAVA_HOME")
    there = SparkSession.getActiveSession()
    spark = there
    if spark is None:
        settings = SparkConf()
        master = master or settings.get("spark.master") or "local[*]"
        own = {"spark.pyspark.python": os.environ.get("PYSPARK_PYTHON", sys.executable)}
        if master.startswith("local"):
            own = {**own, **_LOCAL}
        builder = SparkSession.builder.appName("gmeta prepare").master(master)
        for name, value in {**own, **(conf or {})}.items():
            if (conf and name in conf) or not settings.contains(name):
                builder = builder.config(name, value)
        # Executors read this path from the session; forked workers of a local session, from the environment.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        with spark_errors():
            spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
    before = {name: spark.conf.get(name, None) for name in _SETTINGS}
    try:
        for name, value in _SETTINGS.items():
            spark.conf.set(name, value)
        yield spark
    finally:
        if there is None:
            spark.stop()
        else:
            for name, old in before.items():
                spark.conf.unset(name) if old is None else spark.conf.set(name, old)


@contextmanager
def spark_errors() -> Iterator[None]:
    """Convert Spark's errors to gmeta errors of one line; if a worker raised an error, raise that error.

    Raises:
      GmetaError: Spark raised an error.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        text = str(error)
        if found := re.search(r"gmeta\.core\.errors\.(\w+): (.*)", text):
            kind = getattr(errors, found[1], GmetaError)
            raise (kind if issubclass(kind, GmetaError) else GmetaError)(found[2]) from error
        if raised := re.findall(r"^(\w[\w.]*(?:Error|Exception)): (.*)$", text, re.MULTILINE):
            raise GmetaError(f"a worker of Spark: {raised[-1][0]}: {raised[-1][1]}") from error
        causes = re.findall(r"(?:Caused by: |: )(?:[\w.$]+\.)(\w+(?:Exception|Error)): ([^\n]+)", text)
        said = f"{causes[-1][0]}: {causes[-1][1]}" if causes else text.strip().splitlines()[0]
        raise GmetaError(f"Spark: {said}") from error


_COLLECTED = "collected"  # the folder of the workers' texts, in the staging folder
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
      master: Spark's master, such as ``local[4]`` or ``yarn``. None: that of ``spark-submit``, or this
        machine.
      conf: Settings for a new session. An active session is used unchanged.
      progress: Called at the end of each stage.

    Returns:
      A summary of the data read, kept and left out.

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

    collected = folder / _COLLECTED
    read = partial(work.read, job, files, collected)
    rows = table.mapInArrow(read, work.READ).persist(StorageLevel.DISK_ONLY)
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
    summary = job.finish(folder, shards, census, tally, collected)
    shutil.rmtree(collected, ignore_errors=True)
    return summary


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
    """Find a number for each partition that Spark's hash maps to it, to address rows to partitions."""
    found: dict[int, int] = {}
    start, step = 0, 8 * partitions + 64
    while len(found) < partitions:
        numbers = spark.range(start, start + step, numPartitions=1)
        for number, partition in numbers.selectExpr("id", f"pmod(hash(id), {partitions})").collect():
            found.setdefault(partition, number)
        start += step
    return np.array([found[number] for number in range(partitions)], np.int64)
