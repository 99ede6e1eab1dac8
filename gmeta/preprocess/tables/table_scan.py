"""Reading of one file of a table through DuckDB: its columns, its records, and their lines.

Text remains text (`normalise` parses it): DuckDB's own parser would round 3.7 to the whole number 4. DuckDB
hashes the ids that need hashing. Folders such as ``day=1`` aren't read as columns.
"""

from __future__ import annotations

import contextlib
import csv
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import pyarrow as pa

from gmeta.core.errors import DataError
from gmeta.preprocess.plan.column_types import NUMBERS, Example, Findings, Seen
from gmeta.preprocess.plan.texts import text_column
from gmeta.preprocess.source import Reason
from gmeta.preprocess.table_spec import ColumnSpec, Role, TableSpec
from gmeta.preprocess.tables.duckdb_text import (
    PlainPath,
    arrow_batches,
    explain_errors,
    one_line,
    sql_name,
    sql_text,
)
from gmeta.preprocess.tables.recognition import TableFile, open_text
from gmeta.preprocess.tables.table_files import Records, count_csv
from gmeta.preprocess.tables.type_survey import TEXT, Probe, find, survey

if TYPE_CHECKING:
    import duckdb

_ROWS = 122_880  # a batch; DuckDB's own unit
_VALUES = 1 << 22  # of a batch of many columns
_SHOWN = 60  # characters of a value in a message


def batch_rows(columns: int) -> int:
    """Return the number of rows of a batch with this many columns."""
    return min(_ROWS, max(_VALUES // max(columns, 1), 1))


class Reject(NamedTuple):
    """A line of a file that should be a record, but isn't one.

    Attributes:
      reason: What is wrong with it.
      place: Its place among records, rejects and blank lines, from 0; a header counts too.
      message: What is wrong, and the line's text.
    """

    reason: Reason
    place: int
    message: str


Lines = tuple[dict[int, int], dict[int, int]]
"""A record's number -> its line, and a reject's place -> its line."""


class Scan(ABC):
    """A file of a table.

    Args:
      file: The file.
      connection: DuckDB.

    Attributes:
      rejects: The lines of the file that aren't records; complete once `batches` has ended.
    """

    def __init__(self, file: TableFile, connection: duckdb.DuckDBPyConnection) -> None:
        self.file, self._form = file, file.form
        self._plain = PlainPath(file.read)
        self._connection = connection
        self.rejects: list[Reject] = []

    @abstractmethod
    def headers(self) -> Sequence[tuple[str, ...]]:
        """Return the names of the columns: one list, or several if records differ in them.

        Raises:
          ConfigError: Two columns have names that can't be distinguished.
          DataError: The file can't be read.
        """

    @abstractmethod
    def has(self, source: str) -> bool:
        """Return whether the file may have a column."""

    @abstractmethod
    def type_of(self, source: str) -> pa.DataType | str:
        """Return a column's type: `type_survey.TEXT`, `type_survey.JSON`, or a type of Arrow."""

    @abstractmethod
    def count(self) -> int:
        """Count the records, bad ones included, independently of `batches`."""

    @abstractmethod
    def _table(self, lists: Mapping[str, bool], *, skip: bool) -> str:
        """Return the table in SQL.

        Args:
          lists: The columns that are read -> whether their values may be lists.
          skip: Whether records that can't be parsed are left out.
        """

    def is_empty(self, source: str) -> bool:
        """Return whether a column is known to have no value, without reading it."""
        return False

    def refuse_unpacked(self, sources: Collection[str]) -> None:  # noqa: B027 - most formats need no check
        """Refuse a file in which some columns unpack to far more than its size.

        Raises:
          DataError: Some columns unpack to far more than the file's size.
        """

    def probe(self, source: str, role: Role, column: ColumnSpec) -> Probe:
        """Return the `Probe` of a column for `survey` and `find`."""
        return Probe(source, role, column, self._value(source), self.type_of(source))

    def survey(self, probes: Sequence[Probe]) -> dict[str, Findings]:
        """Survey the values of columns.

        Args:
          probes: Columns that the file has.

        Returns:
          Column -> the kinds of its values.

        Raises:
          DataError: The file can't be read to its end.
        """
        with self._surveying() as cursor:
            return survey(cursor, self._surveyed(probes), probes)

    def find(self, probe: Probe, example: Example) -> str | None:
        """Find the first value of some kinds; return it with its place, or None if there is none."""
        with self._surveying() as cursor:
            found = find(cursor, self._surveyed([probe]), probe, example)
            if found is None:
                return None
            self._after(cursor)
            record, value = found
            return f"{value[:_SHOWN]!r} ({self._place(record)})"

    def _place(self, record: int) -> str:
        if not self.file.by_line:
            return f"{self.file.path}, record {record + 1}"
        line = self.lines({record})[0].get(record)
        return str(self.file.path) if line is None else f"{self.file.path}:{line}"

    def _surveyed(self, probes: Sequence[Probe]) -> str:
        return self._table({probe.source: True for probe in probes}, skip=True)

    @contextmanager
    def _surveying(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Provide a cursor, and discard the bad lines that it encounters."""
        cursor = self._connection.cursor()
        try:
            with explain_errors(self.file.path, self._plain):
                yield cursor
                self._after(cursor)
        finally:
            self.rejects.clear()
            cursor.close()

    def batches(
        self, spec: TableSpec, *, skip: bool, texts: Mapping[str, ColumnSpec] = MappingProxyType({})
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the records, with the columns that the spec names as sources and the file has.

        Args:
          spec: The columns, as `TableSpec.resolve` decided them.
          skip: Whether records that can't be parsed are left out.
          texts: Columns of the table that are also read as text -> how; unless the spec reads such a column
            as text anyway, the records hold it under the name `text_column`.

        Raises:
          DataError: The file can't be read to its end, or not all its records were read.
        """
        hashed = self.hashed_columns(spec)
        values = {
            source: self._column(source, spec.columns[name], hashed=name in hashed)
            for name, source in spec.sources.items()
            if self.has(source)
        }
        lists = {source: bool(spec.columns[name].is_list) for name, source in spec.sources.items()}
        read = {source for name, source in spec.sources.items() if name not in hashed}
        for source, column in texts.items():
            if source not in read and self.has(source):
                values[text_column(source)] = self._column(source, column, hashed=False)
                lists.setdefault(source, bool(column.is_list))
        yield from self._read(values, lists, skip=skip)

    def raw_batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns of the records, each value in its own form; skip records that can't be parsed.

        Raises:
          DataError: The file can't be read to its end, or not all its records were read.
        """
        values = {name: self._raw(name) for name in names if self.has(name)}
        return self._read(values, dict.fromkeys(values, True), skip=True)

    def _raw(self, source: str) -> str:
        """Return what `raw_batches` reads of a column, in SQL."""
        return self._value(source)

    def _read(
        self, values: Mapping[str, str], lists: Mapping[str, bool], *, skip: bool
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the records with some columns: name -> its value in SQL."""
        selected = ", ".join(f"{value} AS {sql_name(source)}" for source, value in values.items())
        query = f"SELECT {selected or 'NULL'} FROM {self._table(lists, skip=skip)}"
        cursor, rows = self._connection.cursor(), 0
        try:
            with explain_errors(self.file.path, self._plain):
                try:
                    for batch in arrow_batches(cursor.sql(query), batch_rows(len(values))):
                        rows += batch.num_rows
                        yield batch
                finally:
                    self._after(cursor)
        finally:
            cursor.close()
        self._check_count(rows)

    def _value(self, source: str) -> str:
        """Return a column in SQL."""
        return sql_name(source)

    def _column(self, source: str, column: ColumnSpec, *, hashed: bool) -> str:
        """Return what `batches` reads of a column, in SQL."""
        value = self._value(source)
        return f"md5_number_lower({value})" if hashed else value

    def _after(self, cursor: duckdb.DuckDBPyConnection) -> None:  # noqa: B027 - most formats leave nothing
        """Handle what reading left in DuckDB, such as rejected lines."""

    def _check_count(self, rows: int) -> None:
        """Raise an error unless all records were read."""
        found = rows + len(self.rejects)
        if found != self.count():
            raise DataError(
                f"it has {self.count():,} records, and {found:,} were read",
                path=self.file.path,
                advice="mend its quotes and line ends, or write it in another format, such as Parquet",
            )

    def hashed_columns(self, spec: TableSpec) -> frozenset[str]:
        """Return the columns of the spec whose texts `batches` hashes."""
        uses = Counter(spec.sources.values())
        return frozenset(
            name
            for name, column in spec.columns.items()
            if column.hash
            and not column.is_list
            and uses[source := spec.sources[name]] == 1
            and self.has(source)
            and (isinstance(kind := self.type_of(source), str) or pa.types.is_string(kind))
        )

    def origins(self, records: Collection[int]) -> Mapping[int, tuple[Scan, int]]:
        """Return the file that some records come from: number -> its scan, and the record's number there."""
        return {record: (self, record) for record in records}

    def lines(self, records: Collection[int], rejects: Collection[int] = ()) -> Lines:
        """Find the lines of some records, and of some rejects, in a text file.

        Args:
          records: The records' numbers in the file, from 0.
          rejects: The rejects' places.

        Returns:
          Number -> line, and place -> line.
        """
        return {}, {}


# Reading of a file of separated fields.

_LINE, _BUFFER = 2_000_000, 32_000_000  # DuckDB's defaults: the most bytes of a line, and bytes read at once
_LONGEST = 256 << 20
_FIELDS = re.compile(r"Expected Number of Columns: (\d+) Found: (\d+)")
_REASONS = {
    "MISSING COLUMNS": Reason.MISSING_FIELD,
    "TOO MANY COLUMNS": Reason.EXTRA_FIELD,
}


class CsvScan(Scan):
    """A file of separated fields."""

    def _table(self, lists: Mapping[str, bool], *, skip: bool) -> str:
        """Return the table in SQL, all fields as text; lines with too few or too many become `rejects`."""
        # The columns get other names: those in the file may be empty, or have any characters.
        columns = ", ".join(f"c{place}: 'VARCHAR'" for place in range(len(self._names)))
        form = self._form
        quote, escape = sql_text(form.quote), sql_text(form.escape or form.quote)
        null = ", ".join(map(sql_text, ("", *form.null)))
        limits = ""
        if self._records.spanning:
            limits = ", parallel=false"
        if (longest := self._records.longest) > _LINE:
            limits += f", max_line_size={longest + 1}, buffer_size={max(2 * longest, _BUFFER)}"
        return (
            f"read_csv({sql_text(str(self._plain))}, header={str(self._form.header).lower()}, "
            f"delim={sql_text(form.delimiter or ',')}, quote={quote}, escape={escape}, nullstr=[{null}], "
            "hive_partitioning=false, "
            f"auto_detect=false, columns={{{columns}}}, store_rejects=true{limits})"
        )

    def headers(self) -> Sequence[tuple[str, ...]]:
        """Return the names in the first line; a column without one has an empty name."""
        return [self._names]

    def type_of(self, source: str) -> str:
        """Return `TEXT`."""
        return TEXT

    def survey(self, probes: Sequence[Probe]) -> dict[str, Findings]:
        """Survey the values of columns; a column's name among numbers isn't counted.

        It occurs if files that begin with a line of names were joined. Such a record is bad.
        """
        found = super().survey(probes)
        mixed = [
            replace(probe, value=f"nullif(trim({probe.value}), {sql_text(probe.source)})")
            for probe in probes
            if Seen.TEXT in found[probe.source].kinds and found[probe.source].kinds & (NUMBERS | Seen.DATE)
        ]
        return found | super().survey(mixed) if mixed and self._form.header else found

    def _value(self, source: str) -> str:
        """Return a column in SQL."""
        return f"c{self._places[source]}"

    def _column(self, source: str, column: ColumnSpec, *, hashed: bool) -> str:
        """Return a column's value in SQL; only the beginning of a text that is too long for a number."""
        value = super()._column(source, column, hashed=hashed)
        long = self._records.longest > _LINE and not (hashed or column.hash or column.is_list)
        return f"left({value}, {_LINE})" if long else value

    def has(self, source: str) -> bool:
        """Return whether the first line names a column."""
        return source in self._places

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self._names)}

    @property
    def _names(self) -> tuple[str, ...]:
        return self.file.names

    @cached_property
    def _records(self) -> Records:
        form = self._form
        found = count_csv(self.file.read, form.delimiter or ",", form.quote, form.escape)
        if found.longest > _LONGEST:
            raise DataError(
                f"it has a record of {found.longest:,} bytes, and at most {_LONGEST:,} can be read",
                path=self.file.path,
                advice="shorten it, or leave it out",
            )
        return found

    def count(self) -> int:
        """Count the records, including those that can't be parsed."""
        # If a line is one field, a blank line is an empty field.
        blank = self._records.blank if len(self._names) == 1 else 0
        return self._records.full + blank - self._form.header

    def _check_count(self, rows: int) -> None:
        found = self._records
        if (
            found.unended and rows + len(self.rejects) == self.count() - 1
        ):  # then DuckDB may drop the last one
            place = found.full + found.blank - 1
            self.rejects.append(
                Reject(
                    Reason.MALFORMED,
                    place,
                    "the file ends within quotes (--quote none, if they enclose no fields)",
                )
            )
        super()._check_count(rows)

    def _after(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Record the lines that DuckDB refused."""
        tables = "SELECT count(*) FROM duckdb_tables() WHERE table_name = 'reject_errors' AND temporary"
        if cursor.execute(tables).fetchall() == [(0,)]:
            return
        query = (
            "SELECT line, min(error_type), min(error_message), min(csv_line) "
            "FROM reject_errors GROUP BY line ORDER BY line"
        )
        for line, kind, message, text in cursor.execute(query).fetchall():
            message = _FIELDS.sub(r"\1 fields expected, got \2", one_line(message).rstrip("."))
            if "Invalid unicode" in message:
                message = "not UTF-8: name the encoding with --encoding, such as latin-1"
            shown = (text or "").strip("\r\n").split("\n")[0]
            reason = _REASONS.get(str(kind), Reason.MALFORMED)
            escaped = f"{self._form.escape or ''}{self._form.quote}"
            if self._form.escape and reason is Reason.MISSING_FIELD and escaped in shown:
                ends = f"{self._form.escape}{escaped}"
                message += f", where {escaped} is a quote inside a field ({ends} ends one)"
            self.rejects.append(Reject(reason, int(line) - 1, f"{message}: {shown[:60]!r}"))
        for table in ("reject_errors", "reject_scans"):
            cursor.execute(f"DROP TABLE {table}")

    def lines(self, records: Collection[int], rejects: Collection[int] = ()) -> Lines:
        """Find lines by reading the file again, as far as needed: fields may span lines."""
        found: dict[int, int] = {}
        refused: dict[int, int] = {}
        bad = {reject.place for reject in self.rejects}
        record, before = -int(self._form.header), 0
        with open_text(self.file.read) as text, contextlib.suppress(csv.Error):
            form = self._form
            delimiter = form.delimiter if form.delimiter and len(form.delimiter) == 1 else "\t"
            quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if form.quote else csv.QUOTE_NONE
            reader = csv.reader(
                text,
                delimiter=delimiter,
                quotechar=form.quote or None,
                escapechar=form.escape,
                quoting=quoting,
            )
            for place, fields in enumerate(reader):
                line, before = before + 1, reader.line_num
                if place in bad:
                    if place in rejects:
                        refused[place] = line
                elif fields:
                    if record in records:
                        found[record] = line
                    record += 1
                if len(found) == len(records) and len(refused) == len(rejects):
                    break
        return found, refused
