"""The part of ``gmeta prepare`` for engines other than this process: Hadoop Streaming jobs and Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gmeta.core.errors import ConfigError
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.config import Engine, PrepareConfig
from gmeta.preprocess.summary import PrepareSummary
from gmeta.preprocess.table_spec import TableSpec

_OF: dict[str, tuple[Engine, ...]] = {
    "synthetic": ("duckdb",),
    "resume": ("duckdb",),
    "memory_limit": ("duckdb",),
    "job": ("streaming",),
    "ranges": ("spark", "streaming"),
    "spark_master": ("spark",),
    "spark_conf": ("spark",),
}


def refuse_foreign(engine: Engine, **given: Any) -> None:
    """Refuse options that the engine has no use for.

    Raises:
      ConfigError: Such an option is given.
    """
    for name, value in given.items():
        if value not in (None, False, ()) and engine not in _OF[name]:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is for --engine {' and '.join(_OF[name])}, not for {engine}")


def describe_jobs(
    data: Sequence[str],
    out: Path,
    config: PrepareConfig,
    on_bad: str,
    spec: TableSpec | None,
    overwrite: bool,
    folder: Path | None,
    ranges: int | None,
) -> str:
    """Make the folder of a job, and return a text that says what comes next.

    Raises:
      ConfigError: The files, the task or the folder aren't given.
      GmetaError: There is something else at ``out``, or the data set is there already.
    """
    if not data or spec is None or folder is None:
        raise ConfigError(
            "--engine streaming needs --data, --task or --spec, and --job, a folder for the jobs"
        )
    job = TableJob.of_files(data, out, spec, config, on_bad, ranges=ranges, overwrite=overwrite)
    if job.is_done():
        return f"already prepared, from the same files with the same settings: {out}"
    folder.mkdir(parents=True, exist_ok=True)
    job.save(folder)
    return (
        f"{folder}: files {len(job.files)}, ranges {job.ranges}, shards {job.config.shards} a split; "
        f"run the jobs (docs/preprocessing.md), then: gmeta-reduce finish --job {folder}"
    )


def run_on_spark(
    data: Sequence[str],
    out: Path,
    config: PrepareConfig,
    on_bad: str,
    spec: TableSpec | None,
    *,
    conf: Sequence[str],
    **options: Any,
) -> PrepareSummary:
    """Prepare on Spark; ``conf`` holds settings ``name=value``, the rest is as for `prepare_on_spark`.

    Raises:
      ConfigError: The data or the task aren't given, or a setting has no value.
    """
    from gmeta.preprocess.cluster import spark_engine

    if not data or spec is None:
        raise ConfigError(
            "--engine spark needs --data, and --task or --spec; it doesn't read MovieLens' files"
        )
    return spark_engine.prepare_on_spark(
        data, out, config, on_bad, spec=spec, conf=parse_settings(conf), **options
    )


def parse_settings(conf: Sequence[str]) -> dict[str, str]:
    """Return Spark's settings of texts ``name=value``.

    Raises:
      ConfigError: A setting has no value.
    """
    if wrong := [setting for setting in conf if "=" not in setting]:
        raise ConfigError(f"--spark-conf {wrong[0]}: write it as NAME=VALUE")
    return dict(setting.split("=", 1) for setting in conf)
