"""The records that Spark reads, as good rows: lines of text with their files, or columns."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from gmeta.preprocess.columns import Columns
from gmeta.preprocess.table_job import TableJob
from gmeta.preprocess.tally import Tally, good_rows
from gmeta.preprocess.text_records import parse_lines

FILE, LINE = "_gmeta_file", "_gmeta_line"
"""Columns of the input: the file's path, and, where it is text, a line."""

Batches = Iterator[pa.RecordBatch]


def good_rows_of(job: TableJob, batches: Batches, tally: Tally) -> Iterator[tuple[int, Columns]]:
    """(file's number, rows) of a partition; what is bad is counted.

    If a bad record ends the run, no more than the first batch that has one is looked at.
    """
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
    different = path.unique().to_pylist()
    for one in different:
        yield job.file_of(one), batch if len(different) == 1 else batch.filter(pc.equal(path, one))


def _lines(batch: pa.RecordBatch) -> bytes:
    lines = batch.column(LINE)
    whole = pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines)
    return pc.binary_join(whole, "\n")[0].as_buffer().to_pybytes()
