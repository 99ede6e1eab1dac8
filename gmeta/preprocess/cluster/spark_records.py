"""Conversion of the records that Spark reads, lines of text with their files or columns, to good rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gmeta.preprocess.cluster.file_splits import FileSplit, read_split
from gmeta.preprocess.cluster.table_input import TableInput
from gmeta.preprocess.cluster.tally import Tally, good_rows
from gmeta.preprocess.cluster.text_records import parse_lines
from gmeta.preprocess.columns import Columns

FILE, LINE = "_gmeta_file", "_gmeta_line"
"""Columns of the input: the file's path and, for a text file, a line."""

Batches = Iterator[pa.RecordBatch]


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
        for file, records in _by_file(job, batch):
            yield file, records if job.files[file].form is None else _lines(records)


def _by_file(job: TableInput, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    if FILE not in batch.schema.names:
        yield 0, batch
        return
    path = batch.column(FILE)
    different = path.unique().to_pylist()
    for one in different:
        yield job.file_of(one), batch if len(different) == 1 else batch.filter(pc.equal(path, one))


def _lines(batch: pa.RecordBatch) -> bytes:
    lines = batch.column(LINE)
    whole = pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines)
    return pc.binary_join(whole, "\n")[0].as_buffer().to_pybytes()
