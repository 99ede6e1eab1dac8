"""Tables as a source: CSV, Parquet and JSON lines, read by DuckDB and normalised batch by batch."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess.columns import Columns, Ints
from gmeta.preprocess.config import PlanConfig, Progress
from gmeta.preprocess.plan.normalisation import Fault, normalise
from gmeta.preprocess.source import NUMBER, BadRecord, BadRecords, Reason, Source
from gmeta.preprocess.table_spec import TableSpec
from gmeta.preprocess.tables.parquet_scan import ParquetScan
from gmeta.preprocess.tables.table_files import FileDigests, Format, TableFile, find_files
from gmeta.preprocess.tables.table_scan import CsvScan, JsonScan, Scan
from gmeta.preprocess.tables.table_survey import resolve_spec

if TYPE_CHECKING:
    import duckdb


_SCANS: Mapping[Format, type[Scan]] = {"parquet": ParquetScan, "csv": CsvScan, "json": JsonScan}


class TableSource:
    """A `Source` of files of one table.

    Args:
      data: Files, folders and patterns (`table_files.find_files`).
      spec: The columns; the values of all files decide its open settings (`table_survey`).
      connection: DuckDB, with its limits set.

    Attributes:
      files: The table's files, in the order in which they are read.

    Raises:
      ConfigError: The spec doesn't fit the files, or values don't decide its open settings.
      DataError: A file is missing, empty, or not of the format that its ending names.
    """

    defaults = PlanConfig()

    def __init__(
        self, data: Sequence[str | os.PathLike[str]], spec: TableSpec, connection: duckdb.DuckDBPyConnection
    ) -> None:
        self.files = find_files(data)
        self.path = Path(data[0])
        self.name = self.path.name if len(data) == 1 else f"{self.path.name} and {len(data) - 1} more"
        self._scans = [_SCANS[file.format](file, spec.csv, connection) for file in self.files]
        try:
            self.spec = resolve_spec(self._scans, spec)
        except ConfigError as error:
            raise ConfigError(f"{self.files[0].path}: {error}") from error
        self._starts: list[int] = []  # the number of each file's first record
        self._digests = FileDigests([file.path for file in self.files])

    @property
    def rows_read(self) -> int:
        """The number of records read so far."""
        return self._rows

    _rows = 0

    def start_digests(self) -> None:
        """Begin to digest the files, in parallel with other work."""
        self._digests.start()

    def parts(self) -> Sequence[Source]:
        """Return the source itself."""
        return (self,)

    def digests(self) -> Mapping[str, str]:
        """Wait for the digests and return them, file name -> SHA-256.

        Raises:
          DataError: A file has changed since its reading began.
        """
        return self._digests.wait()

    def stamps(self) -> dict[str, list[int]]:
        """Return file name -> size and time of the last change, which quickly show whether it has changed."""
        return self._digests.stamps()

    def count(self) -> int:
        """Return the number of records of all files."""
        return sum(scan.count() for scan in self._scans)

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the good rows of all files, in parts."""
        skip = bad.on_bad == "skip"
        total = self.count()
        progress("read", 0, total)
        for scan in self._scans:
            hashed = scan.hashed_columns(self.spec)
            first = self._rows
            self._starts.append(first)
            examples: list[_Example] = []
            with closing(scan.batches(self.spec, skip=skip)) as batches:
                for batch in batches:
                    found = normalise(batch, self.spec, hashed=hashed)
                    for fault in _tell_apart(found.faults, batch, scan.file):
                        _note(examples, fault, self._rows - first, bad.EXAMPLES)
                    if examples and not skip:
                        break
                    if len(found.rows):
                        yield {**found.columns, NUMBER: self._rows + found.rows}
                    self._rows += batch.num_rows
                    if self._rows < total:
                        progress("read", self._rows, total)
            self._report(scan, examples, bad)
        if not self._rows:
            raise DataError("there is no row in it", path=self.path)
        progress("read", self._rows, self._rows)

    def _report(self, scan: Scan, examples: list[_Example], bad: BadRecords) -> None:
        """Report a file's bad records, with their lines."""
        self._rows += len(scan.rejects)
        if not examples and not scan.rejects:
            return
        shown: dict[Reason, list[int]] = {}
        for reject in scan.rejects:
            shown.setdefault(reject.reason, []).append(reject.place)
        places = {place for own in shown.values() for place in own[: bad.EXAMPLES]}
        lines, refused = scan.lines({example.record for example in examples}, places)
        found = [(e.reason, lines.get(e.record), e.words(scan.file.is_text), e.times) for e in examples]
        found += [(r.reason, refused.get(r.place), r.message, 1) for r in scan.rejects]
        if bad.on_bad == "raise":
            found.sort(key=lambda one: one[1] or 0)
        for reason, line, message, count in found:
            bad.add(BadRecord(reason, message, of_table=True), scan.file.path, line, count)

    def where(self, number: int) -> tuple[Path, int | None, str]:
        """Return the file that a record is from, and its line or row."""
        place = bisect_right(self._starts, number) - 1
        record, scan = number - self._starts[place], self._scans[place]
        if not scan.file.is_text:
            return scan.file.path, None, f"row {record + 1}: "
        return scan.file.path, scan.lines({record})[0].get(record), ""

    def check(self, tasks: Ints, bad: BadRecords) -> None:
        """Do nothing: a table has no further rule."""

    def holds_rows(self, file: str) -> bool:
        """Return True: every file holds records."""
        return True


class _Example(NamedTuple):
    """A bad record, and the number of similar ones that aren't shown."""

    reason: Reason
    record: int  # in its file, from 0
    message: str
    times: int  # itself included

    def words(self, is_text: bool) -> str:
        return self.message if is_text else f"row {self.record + 1}: {self.message}"


def _note(examples: list[_Example], fault: Fault, before: int, most: int) -> None:
    """Add a fault's records to a file's examples; records beyond ``most`` for a reason are only counted."""
    known = [place for place, example in enumerate(examples) if example.reason is fault.reason]
    shown = fault.rows[: most - len(known)].tolist()
    examples += [_Example(fault.reason, before + row, fault.describe(row), 1) for row in shown]
    last = len(examples) - 1 if shown else known[-1]
    rest = len(fault.rows) - len(shown)
    examples[last] = examples[last]._replace(times=examples[last].times + rest)


def _tell_apart(faults: Sequence[Fault], batch: pa.RecordBatch, file: TableFile) -> Iterator[Fault]:
    """Report a line that isn't JSON, which has null in every column, as malformed and not as null."""
    nothing = np.ones(batch.num_rows, np.bool_)
    for column in batch.columns if file.format == "json" else ():
        nothing &= column.is_null().to_numpy(zero_copy_only=False)
    for fault in faults:
        if file.format != "json" or fault.reason is not Reason.NULL or not nothing[fault.rows].any():
            yield fault
            continue
        malformed = nothing[fault.rows]
        yield Fault(Reason.MALFORMED, fault.rows[malformed], "not a JSON object with any of the columns")
        if not malformed.all():
            yield replace(fault, rows=fault.rows[~malformed])
