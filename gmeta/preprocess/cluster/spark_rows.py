"""The work of Spark's workers on rows: generators from Arrow batches to Arrow batches, for ``mapInArrow``.

Rows travel between workers in parcels: one cell holds some megabytes of rows as an Arrow stream. Spark moves,
partitions and sorts parcels by the numbers beside them, and never decodes them: to convert twenty columns to
Spark's rows and back, row by row, would cost ten times as much as all the work done here.

This module doesn't import Spark. Each function gets the job and a partition, as an iterator of batches.
"""

from __future__ import annotations

import functools
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa

from gmeta.core.settings import to_mapping
from gmeta.preprocess.cluster.attempts import write_attempt
from gmeta.preprocess.cluster.spark_records import Batches, FileSplit, good_rows_of
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.cluster.tally import Tally
from gmeta.preprocess.columns import (
    Columns,
    Ints,
    Values,
    from_arrow,
    join_rows,
    row_count,
    single,
    take,
    to_arrow,
)
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.numbering import (
    KEY,
    PLACE,
    POSITION,
    Edge,
    RangeCount,
    number_rows,
    place_rows,
    runs,
)
from gmeta.preprocess.plan.ranges import Sampler, range_of
from gmeta.preprocess.source import NUMBER

ROWS, SALT, PIECE = "rows", "salt", "piece"
"""The columns of the parcel, of the number whose hash selects its partition, and of the shard's piece."""

READ = "tally string, stride bigint, sample binary, rows binary"
RANGED = "salt bigint, range bigint, rows binary"
NUMBERED = "range bigint, count string, tally string, rows binary"
PLACED = "salt bigint, piece bigint, rows binary"
WRITTEN = "place bigint, shard string"
"""The columns that the functions yield, in Spark's notation."""

AGAIN = "_gmeta_again"  # 1 if an earlier row of the task has the same key
_PARCEL_BYTES = 4 << 20
_HELD_ROWS = 1 << 18  # rows that are cut into parcels together


def read(job: TableJob, splits: Sequence[FileSplit], batches: Batches) -> Batches:
    """Yield the good rows of a partition, then its tally and a sample."""
    tally, sampler = Tally(), Sampler()
    for file, rows in good_rows_of(job, splits, batches, tally):
        sampler.add(rows)
        found: dict[str, Values] = {**rows}
        if job.spec.unique:
            found[NUMBER] = np.full(row_count(rows), file)
        for parcel in pack(found):
            yield cells(READ, None, None, None, parcel)
    kept = sampler.rows()
    yield cells(READ, tally.to_json(), sampler.stride, kept and next(pack(kept, row_count(kept))), None)


def by_key(job: TableJob, salts: Ints, batches: Batches) -> Batches:
    """Send rows with the same key to the same partition, whatever their ranges."""
    for rows in gather(_unpack(batches)):
        keys = [plan.comparable(single(rows, name)) for name in job.spec.unique]
        task = single(rows, job.spec.task)
        mixed = functools.reduce(lambda h, key: plan.order_key(0, h.view(np.int64), key), keys, task)
        number = (mixed.view(np.uint64) % np.uint64(len(salts))).astype(np.int64)
        for which, parcel in parcels_of(number, rows):
            yield cells(RANGED, int(salts[which]), which, parcel)


def mark_repeated(job: TableJob, bounds: Columns | None, salts: Ints, batches: Batches) -> Batches:
    """Send rows to their ranges, and mark those whose key an earlier row of the task has."""
    parcels = [*_unpack(batches)]
    if parcels:
        rows = join_rows(parcels)
        rows = take(rows, plan.row_order(rows, (*job.spec.order, NUMBER)))
        again = plan.find_repeated(rows, job.spec.task, job.spec.unique)
        yield from _to_ranges(job, {**rows, AGAIN: again.astype(np.int64)}, bounds, salts)


def assign_ranges(job: TableJob, bounds: Columns | None, salts: Ints, batches: Batches) -> Batches:
    """Send rows to their ranges."""
    for rows in gather(_unpack(batches)):
        yield from _to_ranges(job, rows, bounds, salts)


def _to_ranges(job: TableJob, rows: Columns, bounds: Columns | None, salts: Ints) -> Batches:
    number = range_of({name: rows[name] for name in job.spec.columns}, bounds, job.spec.order)
    for which, parcel in parcels_of(number, rows):
        yield cells(RANGED, int(salts[which]), which, parcel)


def number_ranges(job: TableJob, batches: Batches) -> Batches:
    """Sort and number the rows of whole ranges, count each range, and drop rows with repeated keys."""
    for which, parcels in _by_number(batches, "range").items():
        rows, tally = join_rows(parcels), Tally()
        if AGAIN in rows:
            again = single(rows, AGAIN) == 1
            tally.add_repeated(take(rows, np.flatnonzero(again)), job.spec)
            rows = take(rows, np.flatnonzero(~again))
        if not row_count(rows):
            yield cells(NUMBERED, which, None, tally.to_json(), None)
            continue
        rows = number_rows({name: rows[name] for name in job.spec.columns}, job.spec)
        count = RangeCount.of(which, single(rows, job.spec.task), job.config)
        yield cells(NUMBERED, which, json.dumps(to_mapping(count)), tally.to_json(), None)
        for parcel in pack(rows):
            yield cells(NUMBERED, which, None, None, parcel)


def place_pieces(
    job: TableJob, known: Mapping[int, Edge], pieces: int, salts: Ints, batches: Batches
) -> Batches:
    """Send the kept rows, with their batches, to their shards.

    Args:
      job: The job.
      known: The edges of the ranges.
      pieces: The number of ranges of `plan.order_key` into which a shard's rows are cut; each is sorted
        separately.
      salts: The salts of the shards.
      batches: Parcels of numbered rows.
    """
    shards = job.config.shards
    for which, parcels in _by_number(batches, "range").items():
        rows = place_rows(join_rows(parcels), known[which], job.spec, job.config)
        # Pieces refine shards: shard_of(key, shards * pieces) // pieces is shard_of(key, shards).
        key = single(rows, KEY).view(np.uint64) ^ np.uint64(1 << 63)
        piece = single(rows, PLACE) // shards * shards * pieces + plan.shard_of(key, shards * pieces)
        names = (*(column.name for column in job.spec.schema), POSITION, KEY)
        for number, parcel in parcels_of(piece, {name: rows[name] for name in names}):
            yield cells(PLACED, int(salts[number // pieces]), number, parcel)


def write_shards(job: TableJob, folder: Path, pieces: int, batches: Batches) -> Batches:
    """Write shards from pieces that come in order, and yield each shard's manifest entry as JSON."""
    attempt = f"spark-{uuid.uuid4().hex[:8]}"
    parcels = (one for batch in batches for one in numbered_parcels(batch, PIECE))

    def in_order(of_place: Iterator[tuple[int, pa.Scalar]]) -> Iterator[Columns]:
        for _, of_piece in itertools.groupby(of_place, key=lambda one: one[0]):
            rows = join_rows([unpack(parcel) for _, parcel in of_piece])
            yield take(rows, np.lexsort([single(rows, n) for n in (POSITION, job.spec.task, KEY)]))

    for place, of_place in itertools.groupby(parcels, key=lambda one: one[0] // pieces):
        shard = write_attempt(folder, place, job.spec.schema, job.config, in_order(of_place), attempt)
        yield cells(WRITTEN, place, json.dumps(asdict(shard)))


def pack(rows: Columns, most: int | None = None) -> Iterator[bytes]:
    """Pack rows into parcels of at most ``most`` rows or, if it is None, of about 4 MB."""
    table = to_arrow(rows)
    if most is None:
        most = max(1, _PARCEL_BYTES * row_count(rows) // max(table.nbytes, 1))
    for start in range(0, row_count(rows), max(most, 1)):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table.slice(start, most))
        yield sink.getvalue().to_pybytes()


def unpack(parcel: pa.Scalar | bytes) -> Columns:
    """Unpack the rows of a parcel."""
    return from_arrow(
        pa.ipc.open_stream(parcel if isinstance(parcel, bytes) else parcel.as_buffer()).read_all()
    )


def parcels_of(number: Ints, rows: Columns) -> Iterator[tuple[int, bytes]]:
    """Yield (number, parcel); a parcel holds rows of a single number."""
    order = np.argsort(number, kind="stable")
    for which, some in runs(number[order], take(rows, order)):
        for parcel in pack(some):
            yield which, parcel


def numbered_parcels(batch: pa.RecordBatch, name: str) -> Iterator[tuple[int, pa.Scalar]]:
    """Yield (number, parcel) for each row of a batch that has a parcel."""
    for number, parcel in zip(batch.column(name).to_pylist(), batch.column(ROWS), strict=True):
        if parcel.is_valid:
            yield number, parcel


def _unpack(batches: Batches) -> Iterator[Columns]:
    return (unpack(parcel) for batch in batches for parcel in batch.column(ROWS) if parcel.is_valid)


def gather(parts: Iterable[Columns]) -> Iterator[Columns]:
    """Yield the rows of many parts at once."""
    held: list[Columns] = []
    for rows in parts:
        held.append(rows)
        if sum(map(row_count, held)) >= _HELD_ROWS:
            yield join_rows(held)
            held = []
    if held:
        yield join_rows(held)


def _by_number(batches: Batches, name: str) -> dict[int, list[Columns]]:
    found: dict[int, list[Columns]] = {}
    for batch in batches:
        for number, parcel in numbered_parcels(batch, name):
            found.setdefault(number, []).append(unpack(parcel))
    return found


_TYPES = {"string": pa.string(), "bigint": pa.int64(), "binary": pa.binary()}


def cells(form: str, *values: object) -> pa.RecordBatch:
    """Make a batch of one row."""
    fields = [field.split() for field in form.split(", ")]
    arrays = [pa.array([value], _TYPES[kind]) for value, (_, kind) in zip(values, fields, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in fields])
