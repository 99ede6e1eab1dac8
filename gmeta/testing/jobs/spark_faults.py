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

_WRITTEN = spark_rows.write_shards


def written_or_killed(
    job: TableJob, folder: Path, pieces: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """As `spark_rows.write_shards`, but the first worker that comes is killed when it has begun a shard."""

    def watched() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            mark = folder.parent / "killed"
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)

    return _WRITTEN(job, folder, pieces, watched())


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
