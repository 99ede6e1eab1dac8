"""Reads one file of a table through DuckDB: its columns' types, its records, and where a record stands.

Text is left as text (`normalise` parses it): DuckDB's own parser would round 3.7 to the whole number 4. Ids
that are to be hashed are hashed here, natively.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from gmeta.core.errors import DataError, GmetaError
from gmeta.preprocess.bad_records import Reason
from gmeta.preprocess.table_files import TableFile, csv_delimiter, csv_names
from gmeta.preprocess.table_spec import ColumnSpec, CsvForm, TableSpec

if TYPE_CHECKING:
    import duckdb

_ROWS = 122_880  # a batch; DuckDB's own unit
_REASONS = {
    "MISSING COLUMNS": Reason.MISSING_FIELD,
    "TOO MANY COLUMNS": Reason.EXTRA_FIELD,
}


class Reject(NamedTuple):
    """What stands where a record should, but isn't one.

    Attributes:
      reason: What is wrong with it.
      place: Its place among records, rejects and blank lines, from 0; a header counts too.
      message: What is wrong, and its text.
    """

    reason: Reason
    place: int
    message: str


Lines = tuple[dict[int, int], dict[int, int]]
"""Number of a record -> line, and place of a reject -> line."""


class Scan:
    """A file of Parquet, and what the other formats have in common with it.

    Args:
      file: The file.
      form: The form of CSV.
      connection: DuckDB.

    Attributes:
      rejects: What of the file isn't a record; known once `batches` is over.
    """

    def __init__(self, file: TableFile, form: CsvForm, connection: duckdb.DuckDBPyConnection) -> None:
        self.file, self._form = file, form
        self._connection = connection
        self.rejects: list[Reject] = []

    def table(self, spec: TableSpec | None, *, skip: bool) -> str:
        """The table in SQL."""
        return f"read_parquet({quoted(str(self.file.path))})"

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns and their types, guessed where the file is text.

        Raises:
          DataError: The file can't be read.
        """
        return self._described()

    def _described(self) -> pa.Schema:
        query = f"SELECT * FROM {self.table(None, skip=False)} LIMIT 0"
        with errors_explained(self.file.path):
            return self._connection.sql(query).to_arrow_table().schema

    def batches(self, spec: TableSpec, *, skip: bool) -> Generator[pa.RecordBatch, None, None]:
        """The records, with the columns that the spec names as sources and the file has.

        Args:
          spec: The columns, decided.
          skip: Whether records that can't be parsed are left out.

        Raises:
          DataError: The file can't be read to its end.
        """
        there = self.names()
        hashed = self.hashed(spec)
        columns = {
            source: self.column(source, spec.columns[name], hashed=name in hashed)
            for name, source in spec.sources.items()
            if source in there
        }
        selected = ", ".join(f"{value} AS {_name(source)}" for source, value in columns.items())
        query = f"SELECT {selected or 'NULL'} FROM {self.table(spec, skip=skip)}"
        cursor = self._connection.cursor()
        try:
            with errors_explained(self.file.path):
                reader = cursor.sql(query).to_arrow_reader(_ROWS)
                try:
                    yield from reader
                finally:
                    del reader  # a result that is open would keep the cursor
                    self._after(cursor)
        finally:
            cursor.close()

    def column(self, source: str, column: ColumnSpec, *, hashed: bool) -> str:
        """A column's value in SQL."""
        return f"md5_number_lower({_name(source)})" if hashed else _name(source)

    def _after(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Look at what the reading left."""

    def names(self) -> Sequence[str]:
        """The columns of the file."""
        return self.schema.names

    def hashed(self, spec: TableSpec) -> frozenset[str]:
        """The columns of the spec whose texts `batches` has hashed."""
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
        """Records in the file, as far as that is known without reading it."""
        import pyarrow.parquet as pq

        try:
            return int(pq.read_metadata(str(self.file.path)).num_rows)
        except (OSError, pa.ArrowException):
            return None

    def lines(self, records: Collection[int], rejects: Collection[int] = ()) -> Lines:
        """The lines of some records, and of some rejects, in a text file.

        Args:
          records: Their numbers in the file, from 0.
          rejects: Their places.

        Returns:
          Number -> line, and place -> line.
        """
        return {}, {}


class JsonScan(Scan):
    """A file of JSON lines."""

    def table(self, spec: TableSpec | None, *, skip: bool) -> str:
        """Values as text, so that each becomes a number where `normalise` says, or a fault."""
        options = "format='newline_delimited'"
        if spec is None:
            return f"read_json({quoted(str(self.file.path))}, {options}, ignore_errors=true)"
        kinds = {source: spec.columns[name].is_list for name, source in spec.sources.items()}
        columns = ", ".join(
            f"{quoted(name)}: '{'JSON' if many else 'VARCHAR'}'" for name, many in kinds.items()
        )
        options += f", columns={{{columns}}}, ignore_errors={str(skip).lower()}"
        return f"read_json({quoted(str(self.file.path))}, {options})"

    def estimate(self) -> int | None:
        """By the length of the first lines."""
        return _estimate_lines(self.file.path)

    def names(self) -> Sequence[str]:
        """Any: what a line lacks is null."""
        return _Everything()

    def column(self, source: str, column: ColumnSpec, *, hashed: bool) -> str:
        """What should be a list and isn't becomes a list of null, which is bad."""
        name = super().column(source, column, hashed=hashed)
        if not column.is_list:
            return name
        return (
            f"CASE json_type({name}) WHEN 'ARRAY' THEN {name}::VARCHAR[] WHEN 'NULL' THEN NULL "
            f"ELSE CASE WHEN {name} IS NOT NULL THEN [NULL::VARCHAR] END END"
        )

    def batches(self, spec: TableSpec, *, skip: bool) -> Generator[pa.RecordBatch, None, None]:
        """As `Scan.batches`."""
        try:
            yield from super().batches(spec, skip=skip)
        except DataError as error:
            if "JSON" in str(error):
                self._find_malformed()
            raise

    def _find_malformed(self) -> None:
        """DuckDB's line is off by blank lines and one."""
        with _open_text(self.file.path) as text:
            for number, line in enumerate(text, start=1):
                try:
                    value = json.loads(line) if line.strip() else {}
                    fault = "" if isinstance(value, dict) else "a JSON object was expected"
                except ValueError as error:
                    fault = f"not JSON: {error}"
                if fault:
                    shown = repr(line.strip()[:60])
                    advice = "mend it, or leave such records out with --on-bad skip"
                    message = f"{Reason.MALFORMED.value}: {fault}: {shown}"
                    raise DataError(message, path=self.file.path, line=number, advice=advice) from None

    def lines(self, records: Collection[int], rejects: Collection[int] = ()) -> Lines:
        """Lines that aren't blank are records."""
        found: dict[int, int] = {}
        with _open_text(self.file.path) as text:
            full = (number for number, line in enumerate(text, start=1) if line.strip())
            for record, number in enumerate(full):
                if record in records:
                    found[record] = number
                if len(found) == len(records):
                    break
        return found, {}


class CsvScan(Scan):
    """A file of separated fields."""

    def table(self, spec: TableSpec | None, *, skip: bool) -> str:
        """All fields as text; what has too few or too many is noted (`rejects`)."""
        columns = ", ".join(f"{quoted(name)}: 'VARCHAR'" for name in self.names())
        kinds = f"auto_detect=false, columns={{{columns}}}, store_rejects=true"
        if spec is None:
            kinds = (
                "ignore_errors=true"
                if self._form.header
                else f"names={list(self._form.names)!r}, ignore_errors=true"
            )
        quote, delimiter = quoted(self._form.quote), quoted(csv_delimiter(self.file.path, self._form))
        return (
            f"read_csv({quoted(str(self.file.path))}, header={str(self._form.header).lower()}, "
            f"delim={delimiter}, quote={quote}, escape={quote}, hive_partitioning=false, {kinds})"
        )

    @cached_property
    def schema(self) -> pa.Schema:
        """The names that the file states, with the types that DuckDB guesses from the first lines."""
        try:
            guessed = self._described()
        except DataError:
            guessed = None
        if guessed is None or guessed.names != list(self.names()):
            return pa.schema([(name, pa.string()) for name in self.names()])
        return guessed

    def names(self) -> Sequence[str]:
        """The names in the first line."""
        return self._names

    @cached_property
    def _names(self) -> list[str]:
        return csv_names(self.file.path, self._form)

    def estimate(self) -> int | None:
        """By the length of the first lines."""
        return _estimate_lines(self.file.path)

    def _after(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Take note of what DuckDB refused."""
        tables = "SELECT count(*) FROM duckdb_tables() WHERE table_name = 'reject_errors' AND temporary"
        if cursor.execute(tables).fetchall() == [(0,)]:
            return
        query = (
            "SELECT line, min(error_type), min(error_message), min(csv_line) "
            "FROM reject_errors GROUP BY line ORDER BY line"
        )
        for line, kind, message, text in cursor.execute(query).fetchall():
            message = _one_line(message).rstrip(".")
            shown = repr((text or "").strip("\r\n").split("\n")[0][:60])
            reason = _REASONS.get(str(kind), Reason.MALFORMED)
            self.rejects.append(Reject(reason, int(line) - 1, f"{message}: {shown}"))
        for table in ("reject_errors", "reject_scans"):
            cursor.execute(f"DROP TABLE {table}")

    def lines(self, records: Collection[int], rejects: Collection[int] = ()) -> Lines:
        """Read again as far as needed: fields may span lines."""
        found: dict[int, int] = {}
        refused: dict[int, int] = {}
        bad = {reject.place for reject in self.rejects}
        record, before = -int(self._form.header), 0
        with _open_text(self.file.path) as text, contextlib.suppress(csv.Error):
            delimiter = csv_delimiter(self.file.path, self._form)
            reader = csv.reader(text, delimiter=delimiter, quotechar=self._form.quote)
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


_SCANS = {"parquet": Scan, "json": JsonScan, "csv": CsvScan}


def open_scan(file: TableFile, form: CsvForm, connection: duckdb.DuckDBPyConnection) -> Scan:
    """The scan for the file's format."""
    return _SCANS[file.format](file, form, connection)


@contextmanager
def errors_explained(path: Path) -> Iterator[None]:
    """DuckDB's errors as ours, in one line.

    Raises:
      DataError: The file is damaged, or not what it is taken for.
      GmetaError: There is too little memory or room on the disk.
    """
    import duckdb

    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise GmetaError(
            f"{path}: too little memory: {_one_line(str(error))}; allow more with --memory-limit"
        ) from error
    except duckdb.Error as error:
        text = _one_line(str(error))
        if re.search(
            r"No space left|disk is full|temp_directory|temporary (file|block)|File too large", str(error)
        ):
            raise GmetaError(f"can't write temporary files while reading {path}: {text}") from error
        line = re.search(r"\bin line (\d+)", text)
        raise DataError(
            f"can't be read: {text}",
            path=path,
            line=int(line[1]) if line else None,
            advice="mend it, fetch it again, or leave it out",
        ) from error


class _Everything(Sequence[str]):
    """Contains every name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, place: Any) -> Any:
        raise IndexError(place)

    def __len__(self) -> int:
        return 0


def _estimate_lines(path: Path) -> int | None:
    if path.suffix in (".gz", ".zst"):
        return None
    with path.open("rb") as file:
        head = file.read(1 << 20)
    lines = head.count(b"\n")
    return round(path.stat().st_size / len(head) * lines) if lines else 1


def _open_text(path: Path) -> io.TextIOWrapper:
    stream = pa.input_stream(str(path), compression="detect")
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")


def _one_line(message: str) -> str:
    """The first line of a message, without the name of its class."""
    line = message.strip().splitlines()[0] if message.strip() else "unknown error"
    return re.sub(r"^[A-Z][A-Za-z ]* Error: ", "", line).strip()


def quoted(text: str) -> str:
    """A text in SQL."""
    return "'" + text.replace("'", "''") + "'"


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'
