"""The work of Spark's workers on rows: generators from Arrow batches to Arrow batches, for ``mapInArrow``.

Rows travel between workers in parcels: one cell holds some megabytes of rows as an Arrow stream. Spark moves,
partitions and sorts parcels by the numbers beside them, and never decodes them: converting twenty columns to
Spark's rows and back, row by row, would cost ten times as much as all the work done here.

This module doesn't import Spark. Each function takes the job and a partition, as an iterator of batches.
"""

from __future__ import annotations

import functools
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gmeta.core.errors import DataError
from gmeta.core.settings import to_mapping
from gmeta.preprocess.cluster.row_text import blocks, parse_lines
from gmeta.preprocess.cluster.table_input import TableInput, Tally, good_rows
from gmeta.preprocess.cluster.table_job import TableJob, write_attempt
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.ranges import (
    KEY,
    PLACE,
    POSITION,
    Edge,
    RangeCount,
    Sampler,
    number_rows,
    place_rows,
    range_of,
    runs,
)
from gmeta.preprocess.plan.texts import TextCollector
from gmeta.preprocess.source import (
    NUMBER,
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

# The records of a partition, read either by the workers from pieces of files, or by Spark.
#
# A piece is a byte range of a text file, or row groups of a Parquet file. Spark reads what only it can read:
# lines of text with their files, or columns. Both are converted to good rows.

FILE, LINE = "_gmeta_file", "_gmeta_line"
"""Columns of the input: the file's path and, for a text file, a line."""

Batches = Iterator[pa.RecordBatch]

_LEAST, _MOST = 4 << 20, 64 << 20
_BLOCK = 8 << 20
_ROWS = 65_536
_COMPRESSED = (".gz", ".zst")


class FileSplit(NamedTuple):
    """A piece of a file: the lines that begin in a byte range, or row groups; ``stop`` 0: the whole file."""

    file: int
    start: int
    stop: int


def cut_files(job: TableInput, workers: int) -> list[FileSplit]:
    """Cut a job's files into pieces, several for each worker.

    Raises:
      DataError: A file can't be read.
    """
    sizes = [job.path_of(number).stat().st_size for number in range(len(job.files))]
    aim = min(max(sum(sizes) // (3 * workers), _LEAST), _MOST)
    found: list[FileSplit] = []
    for number, size in enumerate(sizes):
        path = job.path_of(number)
        if job.files[number].form is None:
            found += _row_groups(path, number, aim)
        elif path.suffix in _COMPRESSED:
            found.append(FileSplit(number, 0, 0))
        else:
            edges = [*range(0, size, aim), size]
            found += [FileSplit(number, a, b) for a, b in itertools.pairwise(edges)]
    return found


def _row_groups(path: Path, number: int, aim: int) -> Iterator[FileSplit]:
    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    start = size = 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= aim:
            yield FileSplit(number, start, group + 1)
            start, size = group + 1, 0
    if size:
        yield FileSplit(number, start, metadata.num_row_groups)


def read_split(job: TableInput, split: FileSplit) -> Iterator[bytes | pa.RecordBatch]:
    """Yield blocks of lines, or records with the job's columns that the file has.

    Raises:
      DataError: The file can't be read.
    """
    path = job.path_of(split.file)
    try:
        if job.files[split.file].form is None:
            yield from _parquet(path, split, list(dict.fromkeys(job.spec.sources.values())))
        elif not split.stop:
            with pa.input_stream(str(path), compression="detect") as stream:
                yield from blocks(stream)
        else:
            yield from _lines(path, split)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _parquet(path: Path, split: FileSplit, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        there = [name for name in wanted if name in file.schema_arrow.names]
        groups = list(range(split.start, split.stop))
        yield from file.iter_batches(_ROWS, row_groups=groups, columns=there)


def _lines(path: Path, split: FileSplit) -> Iterator[bytes]:
    with path.open("rb") as file:
        if split.start:
            file.seek(split.start - 1)
            file.readline()  # skips the rest of a line that begins in the previous piece
        while (place := file.tell()) < split.stop:
            block = file.read(min(_BLOCK, split.stop - place))
            if not block:
                return
            yield block if block.endswith(b"\n") else block + file.readline()


def _unreadable(path: Path, error: Exception) -> DataError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"can't be read: {said}", path=path, advice="mend it, fetch it again, or leave it out")


def good_rows_of(
    job: TableInput,
    splits: Sequence[FileSplit],
    batches: Batches,
    tally: Tally,
    texts: TextCollector | None = None,
) -> Iterator[tuple[int, Columns]]:
    """Yield (file's number, good rows) of a partition, and count its bad records.

    If a bad record ends the run, reading stops after the first part that has one.

    Args:
      job: The job.
      splits: The splits of the files that workers read themselves; empty if Spark reads the files.
      batches: The numbers of splits; or records, or lines, and their files.
      tally: Counts all records.
      texts: Collects the texts of good rows.
    """
    for file, given in _split_parts(job, splits, batches) if splits else _parts(job, batches):
        form = job.files[file].form
        pieces = [(given, [])] if form is None else parse_lines(given, form, job.spec)
        for records, refused in pieces:
            tally.add_refused(file, refused)
            if (rows := good_rows(records, job.spec, file, tally, texts)) is not None:
                yield file, rows
        if tally.bad and job.on_bad == "raise":
            for _ in batches:  # Spark requires that all batches are consumed
                pass
            return


def _split_parts(job: TableInput, splits: Sequence[FileSplit], batches: Batches) -> Iterator[tuple[int, Any]]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            for given in read_split(job, splits[number]):
                yield splits[number].file, given


def _parts(job: TableInput, batches: Batches) -> Iterator[tuple[int, Any]]:
    for batch in batches:
        for file, records in by_file(job, batch):
            yield file, records if job.files[file].form is None else join_lines(records)


def by_file(job: TableInput, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of each file, with its number."""
    if FILE not in batch.schema.names:
        yield 0, batch
        return
    path = batch.column(FILE)
    different = path.unique().to_pylist()
    for one in different:
        yield job.file_of(one), batch if len(different) == 1 else batch.filter(pc.equal(path, one))


def join_lines(batch: pa.RecordBatch) -> bytes:
    """Return the lines of a batch as one text."""
    lines = batch.column(LINE)
    whole = pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines)
    return pc.binary_join(whole, "\n")[0].as_buffer().to_pybytes()


ROWS, SALT, PIECE = "rows", "salt", "piece"
"""The columns that hold the parcel, the number whose hash selects its partition, and the shard's piece."""

READ = "tally string, stride bigint, sample binary, rows binary"
RANGED = "salt bigint, range bigint, rows binary"
NUMBERED = "range bigint, count string, tally string, rows binary"
PLACED = "salt bigint, piece bigint, rows binary"
WRITTEN = "place bigint, shard string"
"""The columns that the functions yield, in Spark's notation."""

AGAIN = "_gmeta_again"  # 1 if an earlier row of the task has the same key
_PARCEL_BYTES = 4 << 20
_HELD_ROWS = 1 << 18  # rows that are cut into parcels together


def read(job: TableJob, splits: Sequence[FileSplit], collected: Path, batches: Batches) -> Batches:
    """Yield the good rows of a partition, then its tally and a sample; save its texts in ``collected``."""
    tally, sampler, texts = Tally(), Sampler(), job.texts()
    for file, rows in good_rows_of(job, splits, batches, tally, texts):
        sampler.add(rows)
        found: dict[str, Values] = {**rows}
        if job.spec.unique:
            found[NUMBER] = np.full(row_count(rows), file)
        for parcel in pack(found):
            yield cells(READ, None, None, None, parcel)
    texts.save(collected)
    kept = sampler.rows()
    yield cells(READ, tally.to_json(), sampler.stride, kept and next(pack(kept, row_count(kept))), None)


def by_key(job: TableJob, salts: Ints, batches: Batches) -> Batches:
    """Send rows with the same key to the same partition, regardless of their ranges."""
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
    """Write shards from pieces that arrive in order, and yield each shard's manifest entry as JSON."""
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
    """Join parts to larger ones of at least `_HELD_ROWS` rows, except the last, and yield them."""
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
