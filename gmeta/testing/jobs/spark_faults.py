"""Workers of Spark that fail, for tests: in a module that workers can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from gmeta.core.errors import DataError
from gmeta.preprocess.cluster import spark_rows
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.history.cluster import spark_append
from gmeta.preprocess.history.cluster.append_job import AppendJob

_WRITTEN, _APPENDED = spark_rows.write_shards, spark_append.write_shards


def written_or_killed(
    job: TableJob, folder: Path, pieces: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """As `spark_rows.write_shards`, but the first worker that comes is killed when it has begun a shard."""
    return _WRITTEN(job, folder, pieces, _killed_once(batches, folder.parent / "killed"))


def appended_or_killed(
    job: AppendJob, folder: Path, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """As `spark_append.write_shards`, but the first worker that comes is killed when it has begun a shard."""
    return _APPENDED(job, folder, _killed_once(batches, Path(job.plan.store).parent / "killed"))


def _killed_once(batches: Iterator[pa.RecordBatch], mark: Path) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)


def refuse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Raise an error of gmeta's."""
    for _ in batches:
        raise DataError("nothing is right", path="t.csv", line=7)
    return batches


def break_down(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Raise an error of another kind."""
    for _ in batches:
        raise OSError(28, "No space left on device", "/full/out")
    return batches
