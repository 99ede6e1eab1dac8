"""Spark workers that fail, for tests, in a module that workers can import."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from gmeta.core.errors import DataError
from gmeta.preprocess.cluster import spark_rows, streaming_jobs
from gmeta.preprocess.cluster.streaming_jobs import Task
from gmeta.preprocess.cluster.table_input import TableInput
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.history import cluster_append, streaming_append
from gmeta.preprocess.history.cluster_append import AppendJob

_WRITTEN, _APPENDED = spark_rows.write_shards, cluster_append.write_shards


def written_or_killed(
    job: TableJob, folder: Path, pieces: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Like `spark_rows.write_shards`, but the first worker is killed once it has begun a shard."""
    return _WRITTEN(job, folder, pieces, _killed_once(batches, folder.parent / "killed"))


def appended_or_killed(
    job: AppendJob, folder: Path, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Like `cluster_append.write_shards`, but the first worker is killed once it has begun a shard."""
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
    """Raise a gmeta error."""
    for _ in batches:
        raise DataError("nothing is right", path="t.csv", line=7)
    return batches


def break_down(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Raise an error of another kind."""
    for _ in batches:
        raise OSError(28, "No space left on device", "/full/out")
    return batches


# A small Hadoop Streaming: splits of files, mappers, a partition and a sort by bytes, reducers.

Runner = Callable[[str, str, Path, bytes, Mapping[str, str]], bytes]
"""(program, stage, job's folder, standard input, environment) -> standard output."""

PROGRAMS: dict[str, tuple[Mapping[str, Any], Callable[[], None], type[TableInput]]] = {
    "map": (streaming_jobs.MAPPERS, streaming_jobs.main_of_mappers, TableJob),
    "reduce": (streaming_jobs.REDUCERS, streaming_jobs.main_of_reducers, TableJob),
    "append": (streaming_append.STAGES, streaming_append.main, AppendJob),
}
"""Program -> its stages, its console script, and the kind of its jobs."""


def command(program: str) -> list[str]:
    """Return the command that runs the console script of a program."""
    main = PROGRAMS[program][1]
    return [sys.executable, "-c", f"import {main.__module__} as program; program.{main.__name__}()"]


def in_process(program: str, stage: str, folder: Path, data: bytes, environment: Mapping[str, str]) -> bytes:
    """Call the stage's function."""
    stages, _, jobs = PROGRAMS[program]
    sink = io.BytesIO()
    kept = os.environ.copy()
    os.environ.update(environment)
    try:
        stages[stage](Task(jobs.load(folder), folder, io.BytesIO(data), sink))
    finally:
        os.environ.clear()
        os.environ.update(kept)
    return sink.getvalue()


def as_program(program: str, stage: str, folder: Path, data: bytes, environment: Mapping[str, str]) -> bytes:
    """Run the program, as Hadoop does."""
    done = subprocess.run(
        [*command(program), stage, "--job", str(folder)],
        input=data,
        capture_output=True,
        env={**os.environ, **environment},
        check=True,
    )
    return done.stdout


def splits(data: bytes, pieces: int) -> list[bytes]:
    """Whole lines, in pieces of about equal size."""
    lines = data.splitlines(keepends=True)
    edges = [len(lines) * number // pieces for number in range(pieces + 1)]
    return [b"".join(lines[a:b]) for a, b in itertools.pairwise(edges)]


def partitioned(lines: bytes, reducers: int) -> list[bytes]:
    """Each reducer's lines, sorted as ``LC_ALL=C sort`` does: by a hash of the key's first field."""
    found: list[list[bytes]] = [[] for _ in range(reducers)]
    for line in lines.splitlines(keepends=True):
        field = line.split(b"\t", 1)[0].split(b".", 1)[0]
        found[zlib.crc32(field) % reducers].append(line)
    return [b"".join(sorted(part)) for part in found]


def map_files(
    stage: str, folder: Path, files: Sequence[Path], pieces: int, run: Runner, program: str = "map"
) -> bytes:
    """The output of a job's mappers."""
    return b"".join(
        run(program, stage, folder, piece, {"mapreduce_map_input_file": f"hdfs://nn{file.resolve()}"})
        for file in files
        for piece in splits(file.read_bytes(), pieces)
    )


def reduce_all(stage: str, folder: Path, parts: Iterable[bytes], run: Runner) -> bytes:
    """The output of a job's reducers."""
    return b"".join(run("reduce", stage, folder, part, {}) for part in parts)


def run_jobs(
    job: TableJob, folder: Path, *, pieces: int = 2, reducers: int = 3, run: Runner = in_process
) -> None:
    """Run all jobs of a preparation."""
    folder.mkdir(parents=True, exist_ok=True)
    job.save(folder)
    files = [Path(file.path) for file in job.files]
    reduce_all("bounds", folder, partitioned(map_files("sample", folder, files, pieces, run), 1), run)
    rows = partitioned(map_files("rows", folder, files, pieces, run), reducers)
    sorted_rows = [run("reduce", "tasks", folder, part, {}) for part in rows]
    placed = b"".join(run("map", "batches", folder, part, {}) for part in sorted_rows)
    reduce_all("shards", folder, partitioned(placed, reducers), run)
    run("reduce", "finish", folder, b"", {})


def run_append(
    job: AppendJob, folder: Path, *, pieces: int = 2, reducers: int = 3, run: Runner = in_process
) -> None:
    """Run the job of an append to a store of histories, which `plan_jobs` has made."""
    files = [Path(file.path) for file in job.files]
    events = map_files("map", folder, files, pieces, run, "append")
    for part in partitioned(events, reducers):
        run("append", "reduce", folder, part, {})
    run("append", "finish", folder, b"", {})
