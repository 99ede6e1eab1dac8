"""Spark's input: files that every machine sees, addresses that only Spark can open, or Hive tables."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.schema import check_on_bad
from gmeta.preprocess.cluster.row_text import TextForm
from gmeta.preprocess.cluster.spark_rows import FILE, LINE, FileSplit, cut_files
from gmeta.preprocess.cluster.spark_survey import resolve_on_spark
from gmeta.preprocess.cluster.table_input import (
    FoundTable,
    InputFile,
    TableInput,
    find_table,
    refuse_shape,
    text_form,
)
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.config import PlanConfig, PrepareConfig
from gmeta.preprocess.local.preparation import describe_plan
from gmeta.preprocess.table_spec import TableSpec
from gmeta.preprocess.tables.recognition import format_of, names_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HIVE = "hive:"
"""The prefix of the name of a table in Spark's catalogue."""


def open_job(
    spark: SparkSession,
    data: Sequence[str | os.PathLike[str]],
    out: Path,
    spec: TableSpec,
    config: PrepareConfig,
    on_bad: str,
    *,
    overwrite: bool = False,
) -> TableJob:
    """Make the job that prepares a table.

    Files that this machine can read are identified by their digests, as in `gmeta.preprocess.prepare`, so the
    manifest is the same.

    Args:
      spark: The session.
      data: As for `open_table`.
      out: The data set's folder.
      spec: The description of the columns.
      config: The settings.
      on_bad: The rule for bad records.
      overwrite: Whether to replace a data set that was prepared with other settings or input.

    Raises:
      ConfigError: The spec doesn't fit, a setting is out of range, or kinds of data are mixed.
      DataError: There is nothing to read.
    """
    if kind_of(data) == "file":
        return TableJob.of_files(data, out, spec, config, on_bad, overwrite=overwrite)
    rule, settings = check_on_bad(on_bad), config.resolve(PlanConfig())
    table = open_table(spark, data, spec)
    stamps = ", ".join(f"({file!r}, {stamp})" for file, stamp in sorted(table.inputs.items()))
    digest = hashlib.sha256(f"[{stamps}]".encode()).hexdigest()
    inputs = {table.name: f"sizes and times {digest}"}
    return TableJob(
        out=str(out),
        name=table.name,
        spec=table.spec,
        config=settings,
        on_bad=rule,
        plan=describe_plan(table.name, table.spec, settings, rule, inputs),
        files=table.files,
        overwrite=overwrite,
    )


def kind_of(data: Sequence[str | os.PathLike[str]]) -> str:
    """Return the kind of some data: ``"file"``, ``"address"`` or ``"hive"``.

    Raises:
      ConfigError: The data are of several kinds, or several tables.
    """
    given = [os.fspath(one) for one in data]
    kinds = {"hive" if one.startswith(HIVE) else "address" if "://" in one else "file" for one in given}
    if len(kinds) > 1 or (kinds == {"hive"} and len(given) > 1):
        raise ConfigError(f"--data {' '.join(given)}: give files, or addresses, or one hive:table")
    return kinds.pop()


def open_table(spark: SparkSession, data: Sequence[str | os.PathLike[str]], spec: TableSpec) -> FoundTable:
    """Find a table, and decide what its spec leaves open.

    For data that only the cluster can read, workers survey the values, and the files' sizes and modification
    times identify the content.

    Args:
      spark: The session.
      data: Files, folders and patterns; or addresses such as ``hdfs://host/clicks/*.parquet``; or one
        ``hive:database.table``.
      spec: The description of the columns.

    Raises:
      ConfigError: The spec doesn't fit, or kinds of data are mixed.
      DataError: There is nothing to read.
    """
    given, kind = [os.fspath(one) for one in data], kind_of(data)
    if kind == "file":
        return find_table(data, spec)
    refuse_shape(spec)
    spec = spec.with_own_gaps()
    name = given[0].removeprefix(HIVE) if len(given) == 1 else f"{given[0]} and {len(given) - 1} more"
    if kind == "hive":
        table, files = spark.table(name), [InputFile(name)]
        stamps = _stamps(spark, table.inputFiles())
    else:
        stamps = _stamps(spark, given)
        files = [InputFile(file, _form(spark, file, spec)) for file in sorted(stamps)]
        table = _read(spark, files)
    try:
        decided = resolve_on_spark(table, spec, files)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    inputs = {file: repr(stamp) for file, stamp in stamps.items()}
    return FoundTable(name, decided, tuple(files), inputs)


def read_table(
    spark: SparkSession, job: TableInput, data: str | os.PathLike[str]
) -> tuple[DataFrame, list[FileSplit]]:
    """Return the input of `spark_rows.read`: numbers of splits; or lines or columns, and their files.

    The workers themselves read files that every machine sees, as the other engines do: Spark would first
    convert each value to its own form, which takes longer than all other work.

    Args:
      spark: The session.
      job: The job.
      data: The first of the given files, addresses or tables.
    """
    given = os.fspath(data)
    if given.startswith(HIVE):
        table = spark.table(job.files[0].path)
        return table.select(*[_column(name) for name in _columns_to_read(job, table)]), []
    if "://" not in given:
        splits = cut_files(job, spark.sparkContext.defaultParallelism)
        return spark.range(0, len(splits), 1, max(len(splits), 1)), splits
    table = _read(spark, job.files)
    if job.files[0].form is not None:
        return table, []
    return table.select(*[_column(name) for name in _columns_to_read(job, table)], FILE), []


def _read(spark: SparkSession, files: Sequence[InputFile]) -> DataFrame:
    """Return the lines of text files, or the columns of Parquet files, and the files' addresses.

    Raises:
      ConfigError: There are files of both kinds.
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

    paths = [_address(file.path) for file in files]
    kinds = {file.form and file.form.format for file in files}
    if len(kinds) > 1:
        raise ConfigError(
            f"{files[0].path}: files of other formats are beside it: prepare one format at a time"
        )
    file = F.col("_metadata.file_path").alias(FILE)
    if files[0].form is not None:
        return spark.read.text(paths).select(F.col("value").alias(LINE), file)
    return spark.read.option("mergeSchema", True).parquet(*paths).select("*", file)


def _columns_to_read(job: TableInput, table: DataFrame) -> list[str]:
    return [name for name in dict.fromkeys(job.spec.sources.values()) if name in table.columns]


def _column(name: str) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    quoted = name.replace("`", "``")
    return F.col(f"`{quoted}`")


def _form(spark: SparkSession, file: str, spec: TableSpec) -> TextForm | None:
    kind = spec.format or format_of(PurePosixPath(file))
    if kind in ("python", "lists") or spec.csv.encoding.lower() not in ("utf-8", "utf8"):
        raise ConfigError(f"{file}: Spark reads Parquet, and UTF-8 text of CSV or JSON lines")
    if kind == "json":
        return TextForm("json")
    if kind in ("csv", "tsv"):
        is_tab = kind == "tsv" or ".tsv" in PurePosixPath(file).suffixes
        form = replace(spec.csv, delimiter=spec.csv.delimiter or ("\t" if is_tab else ","))
        names: Sequence[str] = form.names
        if form.header:
            names = names_of(io.StringIO(_first_line(spark, file)), file, form, str(form.delimiter))
        return text_form(form, names, file)
    return None


def _first_line(spark: SparkSession, file: str) -> str:
    """Return the first line of a file that may be compressed."""
    context: Any = spark.sparkContext
    jvm, conf = context._jvm, context._jsc.hadoopConfiguration()
    path = jvm.org.apache.hadoop.fs.Path(file)
    stream = path.getFileSystem(conf).open(path)
    try:
        codec = jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(conf).getCodec(path)
        text = stream if codec is None else codec.createInputStream(stream)
        return str(
            jvm.java.io.BufferedReader(jvm.java.io.InputStreamReader(text, "UTF-8")).readLine() or ""
        ).removeprefix("\ufeff")
    finally:
        stream.close()


def _stamps(spark: SparkSession, addresses: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Find the files that addresses and patterns name: file -> size and time of the last change."""
    context: Any = spark.sparkContext
    jvm, conf = context._jvm, context._jsc.hadoopConfiguration()
    found: dict[str, tuple[int, int]] = {}
    for address in addresses:
        path = jvm.org.apache.hadoop.fs.Path(address)
        statuses = path.getFileSystem(conf).globStatus(path)
        if not statuses:
            raise DataError("no file has such a name", path=address)
        waiting = list(statuses)
        while waiting:
            status = waiting.pop()
            own = status.getPath()
            if status.isDirectory():
                waiting += [
                    child
                    for child in own.getFileSystem(conf).listStatus(own)
                    if child.getPath().getName()[0] not in "_."
                ]
            elif status.getLen():
                found[own.toString()] = status.getLen(), status.getModificationTime()
    if not found:
        raise DataError("there is no row in it", path=addresses[0] if addresses else "the table")
    return found


def _address(address: str) -> str:
    """Escape an address so that Spark doesn't read it as a pattern."""
    return "".join(f"\\{one}" if one in "*?[]{}\\" else one for one in address)
