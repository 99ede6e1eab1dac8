"""Splitting of files into pieces that workers read by themselves: byte ranges of text, Parquet row groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from gmeta.core.errors import DataError
from gmeta.preprocess.cluster.row_text import blocks
from gmeta.preprocess.cluster.table_input import TableInput

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
