"""Reading of one file of a table through DuckDB: its columns' types, its records, and their lines.

Text remains text (`normalise` parses it): DuckDB's own parser would round 3.7 to the whole number 4. DuckDB
hashes the ids that need hashing. Folders such as ``day=1`` aren't read as columns.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from gmeta.preprocess.bad_records import Reason
from gmeta.preprocess.table_spec import ColumnSpec, CsvForm, TableSpec, check_names
from gmeta.preprocess.tables.duckdb_text import PlainPath, arrow_batches, explain_errors, sql_name, sql_text
from gmeta.preprocess.tables.table_files import TableFile

if TYPE_CHECKING:
    import duckdb

_ROWS = 122_880  # a batch; DuckDB's own unit


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


class Scan:
    """A Parquet file, and the base class of the other formats.

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

    def table(self, spec: TableSpec | None, *, skip: bool) -> str:
        """Return the table in SQL."""
        return f"read_parquet({sql_text(str(self._plain))}, hive_partitioning=false)"

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns and their types, which are guessed in a text file.

        Raises:
          DataError: The file can't be read.
        """
        return self._describe()

    def _describe(self) -> pa.Schema:
        import pyarrow.parquet as pq

        if self.file.format == "parquet":  # DuckDB would give one of two such columns another name
            with contextlib.suppress(OSError, pa.ArrowException), self.file.path.open("rb") as file:
                check_names(pq.read_schema(file).names, "the file has")
        query = f"SELECT * FROM {self.table(None, skip=False)} LIMIT 0"
        with explain_errors(self.file.path, self._plain):
            return self._connection.sql(query).to_arrow_table().schema

    def batches(self, spec: TableSpec, *, skip: bool) -> Generator[pa.RecordBatch, None, None]:
        """Yield the records, with the columns that the spec names as sources and the file has.

        Args:
          spec: The columns, as `TableSpec.resolve` decided them.
          skip: Whether records that can't be parsed are left out.

        Raises:
          DataError: The file can't be read to its end.
        """
        there = self.names()
        hashed = self.hashed_columns(spec)
        columns = {
            source: self.column(source, spec.columns[name], hashed=name in hashed)
            for name, source in spec.sources.items()
            if source in there
        }
        selected = ", ".join(f"{value} AS {sql_name(source)}" for source, value in columns.items())
        query = f"SELECT {selected or 'NULL'} FROM {self.table(spec, skip=skip)}"
        cursor = self._connection.cursor()
        try:
            with explain_errors(self.file.path, self._plain):
                try:
                    yield from arrow_batches(cursor.sql(query), _ROWS)
                finally:
                    self._after(cursor)
        finally:
            cursor.close()

    def column(self, source: str, column: ColumnSpec, *, hashed: bool) -> str:
        """Return a column's value in SQL."""
        return f"md5_number_lower({sql_name(source)})" if hashed else sql_name(source)

    def _after(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Handle what reading left in DuckDB, such as rejected lines."""

    def names(self) -> Sequence[str]:
        """Return the columns of the file."""
        return self.schema.names

    def hashed_columns(self, spec: TableSpec) -> frozenset[str]:
        """Return the columns of the spec whose texts `batches` hashes."""
        used = list(spec.sources.values())
        types = {field.name: field.type for field in self.schema} if self.file.format == "parquet" else {}
        return frozenset(
            name
            for name, column in spec.columns.items()
            if column.hash
            and not column.is_list
            and used.count(source := spec.sources[name]) == 1
            and source in self.names()
            and pa.types.is_string(types.get(source, pa.string()))
        )

    def estimate(self) -> int | None:
        """Return the number of records, if it is known without reading the file; otherwise None."""
        import pyarrow.parquet as pq

        try:
            return int(pq.read_metadata(str(self.file.path)).num_rows)
        except (OSError, pa.ArrowException):
            return None

    def lines(self, records: Collection[int], rejects: Collection[int] = ()) -> Lines:
        """Find the lines of some records, and of some rejects, in a text file.

        Args:
          records: The records' numbers in the file, from 0.
          rejects: The rejects' places.

        Returns:
          Number -> line, and place -> line.
        """
        return {}, {}


def estimate_lines(path: Path) -> int | None:
    """Estimate the lines of a text file by the length of the first ones; None if it is compressed."""
    if path.suffix in (".gz", ".zst"):
        return None
    with path.open("rb") as file:
        head = file.read(1 << 20)
    lines = head.count(b"\n")
    return round(path.stat().st_size / len(head) * lines) if lines else 1


def open_text(path: Path) -> io.TextIOWrapper:
    """Open a text file, compressed or not, and keep its line ends."""
    stream = pa.input_stream(str(path), compression="detect")
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
