"""The records of a partition: from pieces of files that workers read by themselves, or as Spark reads them.

A piece is a byte range of a text file, or row groups of a Parquet file. Spark reads what only it can read:
lines of text with their files, or columns. Either becomes good rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gmeta.core.errors import DataError
from gmeta.preprocess.cluster.row_text import blocks
from gmeta.preprocess.cluster.table_input import TableInput
from gmeta.preprocess.cluster.tally import Tally, good_rows
from gmeta.preprocess.cluster.text_records import parse_lines
from gmeta.preprocess.columns import Columns

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
    """Cut a job's files into pieces, some for each worker.

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
    """Yield blocks of lines, or records with those of the job's columns that the file has.

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
    job: TableInput, splits: Sequence[FileSplit], batches: Batches, tally: Tally
) -> Iterator[tuple[int, Columns]]:
    """Yield (file's number, good rows) of a partition, and count its bad records.

    If a bad record ends the run, reading stops after the first part that has one.

    Args:
      job: The job.
      splits: The splits of the files that workers read themselves; empty if Spark reads the files.
      batches: The numbers of splits; or records, or lines, and their files.
      tally: Counts all records.
    """
    for file, given in _split_parts(job, splits, batches) if splits else _parts(job, batches):
        form = job.files[file].form
        pieces = [(given, [])] if form is None else parse_lines(given, form, job.spec)
        for records, refused in pieces:
            tally.add_refused(file, refused)
            if (rows := good_rows(records, job.spec, file, tally)) is not None:
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
