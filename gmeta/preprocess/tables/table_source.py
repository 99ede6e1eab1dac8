"""Tables as a source: CSV, Parquet and JSON lines, read by DuckDB and normalised batch by batch."""

from __future__ import annotations

import os
import re
import shlex
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess.config import PlanConfig, Progress
from gmeta.preprocess.plan.normalisation import Fault, Normalised, normalise
from gmeta.preprocess.plan.texts import TextCollector, find_titles
from gmeta.preprocess.shape_spec import SESSION, Join, Shape
from gmeta.preprocess.source import (
    ELEMENT,
    NUMBER,
    RECORD,
    BadRecord,
    BadRecords,
    Columns,
    Ints,
    Reason,
    Source,
)
from gmeta.preprocess.table_spec import GAPS, CsvForm, TableSpec
from gmeta.preprocess.tables.recognition import Format, TableFile, roles_of
from gmeta.preprocess.tables.shaped_table import PLACE, Shaping, raw_names
from gmeta.preprocess.tables.structured_scan import JsonScan, ParquetScan
from gmeta.preprocess.tables.table_files import FileDigests, find_files
from gmeta.preprocess.tables.table_scan import CsvScan, Scan
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
      places: Whether `chunks` also yields a row's origin: `RECORD`, the number of the record
        among those of all files, and `ELEMENT`, the number of the element in the record's list if lists are
        exploded.

    Attributes:
      files: The table's files, in the order in which they are read.

    Raises:
      ConfigError: The spec doesn't fit the files, or values don't decide its open settings.
      DataError: A file is missing, empty, or not of the format that its ending names.
    """

    defaults = PlanConfig()

    def __init__(
        self,
        data: Sequence[str | os.PathLike[str]],
        spec: TableSpec,
        connection: duckdb.DuckDBPyConnection,
        *,
        places: bool = False,
    ) -> None:
        self._places = places
        self.files = find_files(data, spec)
        self.path = Path(data[0])
        self.name = self.path.name if len(data) == 1 else f"{self.path.name} and {len(data) - 1} more"
        self._given = self._scans = [_SCANS[file.format](file, connection) for file in self.files]
        self._malformed: dict[Scan, list[_Example]] = {}
        spec, notes = _with_roles(spec, self.files), list[str]()
        sides = [find_files([join.file], _side_spec(join, spec.csv)) for join in spec.shape.joins]
        try:
            if spec.shape != Shape():
                shaping = Shaping(self._given, spec, connection)
                own = [_SCANS[files[0].format](files[0], connection) for files in sides]
                self._scans, notes = [shaping.run(self._raw(), own)], shaping.notes
                if spec.shape.session_gap:
                    spec = replace(spec, task=SESSION)
            self.spec = resolve_spec(self._scans, spec)
            self.spec = replace(self.spec, notes=(*_notes(spec, self.spec.columns), *notes, *self.spec.notes))
        except ConfigError as error:
            raise ConfigError(f"{self.files[0].path}: {error}") from error
        keys = [join.keys[0] for join in spec.shape.joins]
        names = [raw_names([_SCANS[own[0].format](own[0], connection)]) for own in sides]
        self._texts = TextCollector(self.spec, find_titles(self.spec, [*zip(keys, names, strict=True)]))
        self._starts: list[int] = []  # the number of each file's first record
        self._digests = FileDigests([file.path for files in (self.files, *sides) for file in files])

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
          DataError: A file has changed since reading began.
        """
        return self._digests.wait()

    def stamps(self) -> dict[str, list[int]]:
        """Return file name -> size and time of the last change, which quickly show whether it has changed."""
        return self._digests.stamps()

    def count(self) -> int:
        """Return the number of records of all files."""
        return sum(scan.count() for scan in self._scans)

    def count_records(self) -> int:
        """Return the number of the files' records; `RECORD` numbers those with rows."""
        return sum(scan.count() for scan in self._given)

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the good rows of all files, in parts."""
        skip = bad.on_bad == "skip"
        total = self.count()
        progress("read", 0, total)
        if self._scans is not self._given:
            for scan in self._given:  # what didn't become rows
                self._report(scan, self._malformed.get(scan, []), bad)
                self._rows += len(self._malformed.get(scan, []))
        for scan in self._scans:
            hashed = scan.hashed_columns(self.spec)
            first = self._rows
            self._starts.append(first)
            examples: list[_Example] = []
            with closing(scan.batches(self.spec, skip=skip, texts=self._texts.sources)) as batches:
                for batch in batches:
                    place = {name: batch[name].to_numpy() for name in PLACE if name in batch.schema.names}
                    batch = batch.drop_columns([*place])
                    found = self._normalise(batch, scan, hashed)
                    self._texts.add(batch, found)
                    for fault in _tell_apart(found.faults, batch, scan.file):
                        _note(examples, fault, self._rows - first, bad.EXAMPLES)
                    if examples and not skip:
                        break
                    if len(found.rows):
                        number = self._rows + found.rows
                        yield {**found.columns, NUMBER: number, **self._place(number, found.rows, place)}
                    self._rows += batch.num_rows
                    if self._rows < total:
                        progress("read", self._rows, total)
            self._report(scan, examples, bad)
        if not self._rows:
            raise DataError("there is no row in it", path=self.path)
        progress("read", self._rows, self._rows)

    def _place(self, number: Ints, rows: Ints, place: Mapping[str, Ints]) -> Columns:
        """Return `RECORD` and `ELEMENT` of rows, if requested."""
        if not self._places:
            return {}
        if not place:
            return {RECORD: number}
        file, record, element = (place[name][rows] for name in PLACE)
        before = np.cumsum([0, *(scan.count() for scan in self._given)])
        elements = {ELEMENT: element} if self.spec.shape.explode else {}
        return {RECORD: before[file] + record, **elements}

    def _normalise(self, batch: pa.RecordBatch, scan: Scan, hashed: Collection[str]) -> Normalised:
        """Convert records to rows; a line that isn't JSON, so null in each column, isn't a row of gaps."""
        nothing = (
            _is_null(batch) if scan.file.format == "json" and self.spec.blocks else np.zeros(0, np.bool_)
        )
        if not nothing.any():
            return normalise(batch, self.spec, hashed=hashed)
        there = np.flatnonzero(~nothing)
        found = normalise(batch.take(pa.array(there)), self.spec, hashed=hashed)
        faults = [replace(fault, rows=there[fault.rows], given=None) for fault in found.faults]
        malformed = Fault(Reason.MALFORMED, np.flatnonzero(nothing), _NO_OBJECT)
        return Normalised(found.columns, there[found.rows], (*faults, malformed))

    def _report(self, scan: Scan, examples: list[_Example], bad: BadRecords) -> None:
        """Report a file's bad records, with their lines."""
        self._rows += len(scan.rejects)
        if not examples and not scan.rejects:
            return
        shown: dict[Reason, list[int]] = {}
        for reject in scan.rejects:
            shown.setdefault(reject.reason, []).append(reject.place)
        places = {place for own in shown.values() for place in own[: bad.EXAMPLES]}
        refused = scan.lines((), places)[1]
        found = [(r.reason, scan.file.path, refused.get(r.place), r.message, 1) for r in scan.rejects]
        origins = scan.origins({example.record for example in examples})
        of_scan = {own: [n for s, n in origins.values() if s is own] for own, _ in origins.values()}
        lines = {own: own.lines(numbers)[0] for own, numbers in of_scan.items()}
        for example in examples:
            own, record = origins[example.record]
            message = example.message if own.file.is_text else f"row {record + 1}: {example.message}"
            found.append((example.reason, own.file.path, lines[own].get(record), message, example.times))
        if bad.on_bad == "raise":
            found.sort(key=lambda one: one[2] or 0)
        for reason, path, line, message, count in found:
            bad.add(BadRecord(reason, message, of_table=True), path, line, count)

    def write_texts(self, folder: Path) -> Sequence[str]:
        """Write the texts of the rows that `chunks` has yielded."""
        return self._texts.write(folder)

    def where(self, number: int) -> tuple[Path, int | None, str]:
        """Return the file that a record is from, and its line or row."""
        place = bisect_right(self._starts, number) - 1
        record = number - self._starts[place]
        scan, record = self._scans[place].origins([record])[record]
        if not scan.file.is_text:
            return scan.file.path, None, f"row {record + 1}: "
        return scan.file.path, scan.lines({record})[0].get(record), ""

    def _raw(self) -> Iterator[tuple[int, Ints, pa.RecordBatch]]:
        """Yield the files' records for `Shaping`, without lines that aren't JSON."""
        for number, scan in enumerate(self._given):
            first, bad = 0, list[int]()
            for batch in scan.raw_batches(raw_names([scan])):
                good = ~_is_null(batch) | (scan.file.format != "json")
                bad += (first + np.flatnonzero(~good)).tolist()
                yield number, first + np.flatnonzero(good), batch.filter(pa.array(good))
                first += batch.num_rows
            self._malformed[scan] = [_Example(Reason.MALFORMED, record, _NO_OBJECT, 1) for record in bad]

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


def _note(examples: list[_Example], fault: Fault, before: int, most: int) -> None:
    """Add a fault's records to a file's examples; records beyond ``most`` for a reason are only counted."""
    known = [place for place, example in enumerate(examples) if example.reason is fault.reason]
    shown = fault.rows[: most - len(known)].tolist()
    examples += [_Example(fault.reason, before + row, fault.describe(row), 1) for row in shown]
    last = len(examples) - 1 if shown else known[-1]
    rest = len(fault.rows) - len(shown)
    examples[last] = examples[last]._replace(times=examples[last].times + rest)


_NO_OBJECT = "not a JSON object with any of the columns"


def _is_null(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return which records have null in every column."""
    nothing = np.ones(batch.num_rows, np.bool_)
    for column in batch.columns:
        nothing &= column.is_null().to_numpy(zero_copy_only=False)
    return nothing


def _with_roles(spec: TableSpec, files: Sequence[TableFile]) -> TableSpec:
    """Add the roles of the columns to a table without a task, if it is well known."""
    roles = roles_of(name for file in files for name in file.names) if spec.blocks else None
    if roles is None:
        return spec.with_own_gaps()
    given = {name: value for name in ("time", "label") if (value := getattr(spec, name)) is not None}
    return replace(spec, blocks=0, **{**roles, **given})


def _side_spec(join: Join, form: CsvForm) -> TableSpec:
    """Return how a side table is read: with its own delimiter and columns, otherwise as the rows are."""
    own = CsvForm(
        quote=form.quote,
        header=not join.columns,
        names=join.columns,
        encoding=form.encoding,
        null=form.null,
    )
    return TableSpec(csv=own)


_USER_NAME = re.compile(r"(user|visitor|customer|member|reader|viewer|client|u)[\W_]*(id)?", re.IGNORECASE)


def _notes(spec: TableSpec, columns: Iterable[str]) -> list[str]:
    """Return a note on what stands for the task if there is none, and on a column that may be the task."""
    if not spec.blocks:
        return []
    blocks = f"a hash puts each row into one of {spec.blocks:,} blocks"
    gaps = ", and missing values are values of their own" * (GAPS in spec.defaults)
    found = next((name for name in columns if _USER_NAME.fullmatch(name)), None)
    advice = (
        ""
        if found is None
        else f"; if {found!r} has the users, prepare again with --task {shlex.quote(found)}"
    )
    return [f"without --task, {blocks}{gaps}: for models that need no tasks{advice}"]


def _tell_apart(faults: Sequence[Fault], batch: pa.RecordBatch, file: TableFile) -> Iterator[Fault]:
    """Report a line that isn't JSON, which has null in every column, as malformed and not as null."""
    nothing = _is_null(batch) if file.format == "json" else np.zeros(0, np.bool_)
    for fault in faults:
        if file.format != "json" or fault.reason is not Reason.NULL or not nothing[fault.rows].any():
            yield fault
            continue
        malformed = nothing[fault.rows]
        yield Fault(Reason.MALFORMED, fault.rows[malformed], _NO_OBJECT)
        if not malformed.all():
            yield replace(fault, rows=fault.rows[~malformed])
