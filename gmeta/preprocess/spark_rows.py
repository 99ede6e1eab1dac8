"""What Spark's workers do with rows: generators from Arrow's batches to Arrow's batches, for ``mapInArrow``.

Nothing here knows Spark. A function gets the job and a partition, as an iterator of batches; rows of ranges
and of shards stand together in it, because Spark brought them there.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gmeta.core.schema import Column
from gmeta.preprocess import plan
from gmeta.preprocess.attempts import write_attempt
from gmeta.preprocess.columns import Columns, Ints, from_arrow, joined, part, row_count, single, take
from gmeta.preprocess.numbering import (
    COUNT,
    KEY,
    PLACE,
    POSITION,
    Edge,
    RangeCount,
    number_rows,
    place_rows,
    runs,
)
from gmeta.preprocess.ranges import Sampler, range_of
from gmeta.preprocess.source import NUMBER
from gmeta.preprocess.table_job import TableJob
from gmeta.preprocess.tally import Tally, good_rows
from gmeta.preprocess.text_records import parse_lines

FILE, LINE = "_gmeta_file", "value"
"""Columns of the input: the file's path, and, where it is text, a line."""

RANGE, SALT, AGAIN = "_gmeta_range", "_gmeta_salt", "_gmeta_again"
"""Columns that are added: the range; what hashes to the partition that a row belongs to; 1 where the row's
key was in its task before."""

Batches = Iterator[pa.RecordBatch]
_ROWS = 65_536


def survey(job: TableJob, batches: Batches) -> Batches:
    """A partition's tally, and a sample of its rows as an Arrow stream."""
    tally, sampler = Tally(), Sampler()
    for _, rows in _good_rows(job, batches, tally):
        sampler.add(rows)
    kept, sample = sampler.rows(), None
    if kept is not None:
        sink = pa.BufferOutputStream()
        batch = to_batch(kept, job.columns())
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write(batch)
        sample = sink.getvalue().to_pybytes()
    arrays = [
        pa.array([tally.to_json()]),
        pa.array([sampler.stride]),
        pa.array([sample], pa.binary()),
    ]
    yield pa.RecordBatch.from_arrays(arrays, names=["tally", "stride", "sample"])


def read_sample(data: bytes) -> Columns:
    """The rows of a sample."""
    return from_arrow(pa.ipc.open_stream(data).read_all())


def plain(job: TableJob, batches: Batches) -> Batches:
    """The good rows, each with the number of its file."""
    columns = job.columns(NUMBER)
    for file, rows in _good_rows(job, batches, Tally()):
        yield to_batch({**rows, NUMBER: np.full(row_count(rows), file)}, columns)


def marked(job: TableJob, bounds: Columns | None, salts: Ints, batches: Batches) -> Batches:
    """Rows with their ranges, of which those are marked whose key was in their task before."""
    rows = _whole(batches)
    if rows is None:
        return
    rows = take(rows, plan.row_order(rows, (*job.spec.order, NUMBER)))
    again = plan.repeated(rows, job.spec.task, job.spec.unique).astype(np.int64)
    yield from _ranged(job, {**rows, AGAIN: again}, bounds, salts)


def ranged(job: TableJob, bounds: Columns | None, salts: Ints, batches: Batches) -> Batches:
    """The good rows with their ranges."""
    for _, rows in _good_rows(job, batches, Tally()):
        yield from _ranged(job, rows, bounds, salts)


def added(job: TableJob) -> tuple[str, ...]:
    """The columns that rows have besides the spec's, until repeated ones are out."""
    return (NUMBER, AGAIN) if job.spec.unique else ()


def _ranged(job: TableJob, rows: Columns, bounds: Columns | None, salts: Ints) -> Batches:
    for start in range(0, row_count(rows), _ROWS):
        some = part(rows, start, start + _ROWS)
        number = range_of({name: some[name] for name in job.spec.columns}, bounds, job.spec.order)
        columns = job.columns(*added(job), RANGE, SALT)
        yield to_batch({**some, RANGE: number, SALT: salts[number]}, columns)


def numbered(job: TableJob, batches: Batches) -> Batches:
    """The rows of whole ranges in order, numbered; repeated ones at the position -1."""
    rows = _whole(batches)
    if rows is None:
        return
    number = single(rows, RANGE)
    columns = job.columns(*added(job), RANGE, POSITION, COUNT)
    for which in np.unique(number).tolist():
        own = take(rows, np.flatnonzero(number == which))
        parts: list[Columns] = []
        if job.spec.unique:
            again = np.flatnonzero(single(own, AGAIN))
            out = {
                **take(own, again),
                POSITION: np.full(len(again), -1),
                COUNT: np.zeros(len(again), np.int64),
            }
            parts.append(out)
            own = take(own, np.flatnonzero(single(own, AGAIN) == 0))
        parts.append(number_rows(own, job.spec))
        for some in parts:
            for start in range(0, row_count(some), _ROWS):
                yield to_batch(part(some, start, start + _ROWS), columns)


def counted(job: TableJob, batches: Batches) -> Batches:
    """What `numbering.edges` needs of each range, and a tally of the repeated rows."""
    tally = Tally()
    tasks: dict[int, list[Ints]] = {}
    for batch in batches:
        rows = from_arrow(batch)
        good = single(rows, POSITION) >= 0
        if not good.all():
            tally.add_repeated(take(rows, np.flatnonzero(~good)), job.spec)
        task, number = single(rows, job.spec.task)[good], single(rows, RANGE)[good]
        for which, some in runs(number, {job.spec.task: task}):
            tasks.setdefault(which, []).append(single(some, job.spec.task))
    counts: list[str | None] = [
        json.dumps(asdict(RangeCount.of(which, np.concatenate(some), job.config)))
        for which, some in tasks.items()
    ]
    tallies = [tally.to_json() if place == 0 else None for place in range(max(len(counts), 1))]
    arrays = [pa.array(counts or [None], pa.string()), pa.array(tallies, pa.string())]
    yield pa.RecordBatch.from_arrays(arrays, names=["count", "tally"])


def placed(job: TableJob, known: Mapping[int, Edge], salts: Ints, batches: Batches) -> Batches:
    """The rows that are kept, with their batches and where they are written."""
    columns = job.columns(job.spec.batch, POSITION, PLACE, KEY, SALT)
    for batch in batches:
        rows = from_arrow(batch)
        good = np.flatnonzero(single(rows, POSITION) >= 0)
        rows = take(rows, good) if len(good) < row_count(rows) else rows
        for which, some in runs(single(rows, RANGE), rows):
            found = place_rows(some, known[which], job.spec, job.config)
            yield to_batch({**found, SALT: salts[single(found, PLACE)]}, columns)


def written(job: TableJob, folder: Path, batches: Batches) -> Batches:
    """Write shards, whose rows come in order; what the manifest says of each, as JSON."""
    parts = (one for batch in batches for one in _by_place(from_arrow(batch)))
    attempt = f"spark-{uuid.uuid4().hex[:8]}"
    for place, found in itertools.groupby(parts, key=lambda one: one[0]):
        shard = write_attempt(
            folder, place, job.spec.schema, job.config, (some for _, some in found), attempt
        )
        arrays = [pa.array([place]), pa.array([json.dumps(asdict(shard))])]
        yield pa.RecordBatch.from_arrays(arrays, names=["place", "shard"])


def _by_place(rows: Columns) -> Iterator[tuple[int, Columns]]:
    return runs(single(rows, PLACE), rows)


def _good_rows(job: TableJob, batches: Batches, tally: Tally) -> Iterator[tuple[int, Columns]]:
    """(file, rows) of a partition; if a bad record ends the run, up to the first batch that has one."""
    for batch in batches:
        if tally.bad and job.on_bad == "raise":
            continue
        for file, records in _by_file(job, batch):
            form = job.files[file].form
            for some, refused in parse_lines(_lines(records), form, job.spec) if form else [(records, [])]:
                tally.add_refused(file, refused)
                if (rows := good_rows(some, job.spec, file, tally)) is not None:
                    yield file, rows


def _by_file(job: TableJob, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    if FILE not in batch.schema.names:
        yield 0, batch
        return
    path = batch.column(FILE)
    for one in path.unique().to_pylist():
        yield job.file_of(one), batch if len(path.unique()) == 1 else batch.filter(pc.equal(path, one))


def _lines(batch: pa.RecordBatch) -> bytes:
    lines = batch.column(LINE)
    whole = pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines)
    return pc.binary_join(whole, "\n")[0].as_buffer().to_pybytes()


def _whole(batches: Batches) -> Columns | None:
    parts = [from_arrow(batch) for batch in batches if batch.num_rows]
    return joined(parts) if parts else None


def to_batch(rows: Columns, columns: list[Column]) -> pa.RecordBatch:
    """Rows in the types that Spark takes."""
    arrays = []
    for column in columns:
        values = rows[column.name]
        if isinstance(values, tuple):
            flat = pa.array(np.ascontiguousarray(values[0], column.dtype))
            arrays.append(pa.ListArray.from_arrays(pa.array(values[1], pa.int32()), flat))
        else:
            arrays.append(pa.array(np.ascontiguousarray(values, column.dtype)))
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in columns])
