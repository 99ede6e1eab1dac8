"""Reading of one file of a table through DuckDB: its columns, its records, and their lines.

Text remains text (`normalise` parses it): DuckDB's own parser would round 3.7 to the whole number 4. DuckDB
hashes the ids that need hashing. Folders such as ``day=1`` aren't read as columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from gmeta.core.errors import DataError
from gmeta.preprocess.bad_records import Reason
from gmeta.preprocess.plan.column_types import Example, Findings
from gmeta.preprocess.table_spec import ColumnSpec, CsvForm, Role, TableSpec
from gmeta.preprocess.tables.duckdb_text import PlainPath, arrow_batches, explain_errors, sql_name
from gmeta.preprocess.tables.table_files import TableFile
from gmeta.preprocess.tables.type_survey import Probe, find, survey

if TYPE_CHECKING:
    import duckdb

_ROWS = 122_880  # a batch; DuckDB's own unit
_VALUES = 1 << 22  # of a batch of many columns
_SHOWN = 60  # characters of a value in a message


def batch_rows(columns: int) -> int:
    """Return how many rows a batch of so many columns has."""
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
      form: The format of CSV files.
      connection: DuckDB.

    Attributes:
      rejects: The lines of the file that aren't records; complete once `batches` has ended.
    """

    def __init__(self, file: TableFile, form: CsvForm, connection: duckdb.DuckDBPyConnection) -> None:
        self.file, self._form = file, form
        self._plain = PlainPath(file.path)
        self._connection = connection
        self.rejects: list[Reject] = []

    @abstractmethod
    def headers(self) -> Sequence[tuple[str, ...]]:
        """Return the names of the columns: one list, or where records differ in them, several.

        Raises:
          ConfigError: Two columns have names that can't be told apart.
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
        """Count the records, in another way than `batches` reads them; bad ones too."""

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
        """Refuse a file of which some columns unpack to very much more than its size.

        Raises:
          DataError: They do.
        """

    def probe(self, source: str, role: Role, column: ColumnSpec) -> Probe:
        """Return what `survey` and `find` need of a column."""
        return Probe(source, role, column, self._value(source), self.type_of(source))

    def survey(self, probes: Sequence[Probe]) -> dict[str, Findings]:
        """Find out what values columns have.

        Args:
          probes: Columns that the file has.

        Returns:
          Column -> what its values are.

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
        line = self.lines({record})[0].get(record)
        return str(self.file.path) if line is None else f"{self.file.path}:{line}"

    def _surveyed(self, probes: Sequence[Probe]) -> str:
        return self._table({probe.source: True for probe in probes}, skip=True)

    @contextmanager
    def _surveying(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Lend a cursor; bad lines that it meets are forgotten."""
        cursor = self._connection.cursor()
        try:
            with explain_errors(self.file.path, self._plain):
                yield cursor
                self._after(cursor)
        finally:
            self.rejects.clear()
            cursor.close()

    def batches(self, spec: TableSpec, *, skip: bool) -> Generator[pa.RecordBatch, None, None]:
        """Yield the records, with the columns that the spec names as sources and the file has.

        Args:
          spec: The columns, as `TableSpec.resolve` decided them.
          skip: Whether records that can't be parsed are left out.

        Raises:
          DataError: The file can't be read to its end, or not all its records were read.
        """
        hashed = self.hashed_columns(spec)
        columns = {
            source: self._column(source, spec.columns[name], hashed=name in hashed)
            for name, source in spec.sources.items()
            if self.has(source)
        }
        lists = {source: bool(spec.columns[name].is_list) for name, source in spec.sources.items()}
        selected = ", ".join(f"{value} AS {sql_name(source)}" for source, value in columns.items())
        query = f"SELECT {selected or 'NULL'} FROM {self._table(lists, skip=skip)}"
        cursor, rows = self._connection.cursor(), 0
        try:
            with explain_errors(self.file.path, self._plain):
                try:
                    for batch in arrow_batches(cursor.sql(query), batch_rows(len(columns))):
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

    def lines(self, records: Collection[int], rejects: Collection[int] = ()) -> Lines:
        """Find the lines of some records, and of some rejects, in a text file.

        Args:
          records: The records' numbers in the file, from 0.
          rejects: The rejects' places.

        Returns:
          Number -> line, and place -> line.
        """
        return {}, {}
