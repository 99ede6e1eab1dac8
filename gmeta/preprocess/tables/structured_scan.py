"""Reading of one file of JSON lines, or of one Parquet file, through DuckDB."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import pyarrow as pa
import pyarrow.parquet as pq

from gmeta.core.errors import DataError, first_line
from gmeta.preprocess.plan.column_values import is_text
from gmeta.preprocess.source import Reason
from gmeta.preprocess.table_spec import ColumnSpec, Role, check_names
from gmeta.preprocess.tables.duckdb_text import (
    explain_errors,
    sql_name,
    sql_text,
)
from gmeta.preprocess.tables.recognition import open_text
from gmeta.preprocess.tables.table_files import Records, count_lines
from gmeta.preprocess.tables.table_scan import Lines, Scan
from gmeta.preprocess.tables.type_survey import JSON, Probe


def json_list(value: str) -> str:
    """Return a list of JSON in SQL; a value that isn't one becomes [null]."""
    return (
        f"CASE json_type({value}) WHEN 'ARRAY' THEN ({value})::JSON::VARCHAR[] WHEN 'NULL' THEN NULL "
        f"ELSE CASE WHEN {value} IS NOT NULL THEN [NULL::VARCHAR] END END"
    )


class JsonScan(Scan):
    """A file of JSON lines."""

    def _table(self, lists: Mapping[str, bool], *, skip: bool) -> str:
        """Return the table in SQL; values that may be lists as JSON, others as text."""
        columns = ", ".join(
            f"{sql_text(name)}: '{'JSON' if many else 'VARCHAR'}'" for name, many in lists.items()
        )
        return (
            f"read_json({sql_text(str(self._plain))}, format='newline_delimited', hive_partitioning=false, "
            f"columns={{{columns}}}, ignore_errors={str(skip).lower()})"
        )

    def headers(self) -> Sequence[tuple[str, ...]]:
        """Return the keys of the longest object, and all other keys."""
        objects = f"read_ndjson_objects({sql_text(str(self._plain))}, ignore_errors=true)"
        query = (
            f"WITH found AS MATERIALIZED (SELECT DISTINCT json_keys(json) AS keys FROM {objects}) "
            "SELECT (SELECT keys FROM found ORDER BY len(keys) DESC, keys LIMIT 1), "
            "(SELECT list(DISTINCT key) FROM (SELECT unnest(keys) AS key FROM found))"
        )
        with self._surveying() as cursor:
            longest, all_ = cursor.execute(query).fetchall()[0]
        return [tuple(longest or ()), *((key,) for key in all_ or ())]

    def type_of(self, source: str) -> str:
        """Return `JSON`."""
        return JSON

    def probe(self, source: str, role: Role, column: ColumnSpec) -> Probe:
        """Return the `Probe` of a column for `survey` and `find`."""
        return replace(super().probe(source, role, column), value=f"{self._value(source)}::VARCHAR")

    def has(self, source: str) -> bool:
        """Accept any name: a column that a line lacks is null."""
        return True

    @cached_property
    def _records(self) -> Records:
        return count_lines(self.file.read)

    def count(self) -> int:
        """Count the lines that aren't blank."""
        return self._records.full

    def _check_count(self, rows: int) -> None:
        if rows != self.count():
            self._records = count_lines(self.file.read, spaces=True)
        super()._check_count(rows)

    def _column(self, source: str, column: ColumnSpec, *, hashed: bool) -> str:
        """Return a column's value in SQL; a value that should be a list becomes [null], which is bad."""
        name = super()._column(source, column, hashed=hashed)
        if not column.is_list:
            return name
        return json_list(name)

    def _raw(self, source: str) -> str:
        """Return a column's JSON in SQL."""
        return f"nullif({self._value(source)}::VARCHAR, 'null')"

    def _read(
        self, values: Mapping[str, str], lists: Mapping[str, bool], *, skip: bool
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the records with some columns."""
        try:
            yield from super()._read(values, lists, skip=skip)
        except DataError as error:
            if "JSON" in str(error):
                self._find_malformed()
            raise

    def _find_malformed(self) -> None:
        """Raise an error with the malformed line's number; DuckDB's is off by one and the blank lines."""
        with open_text(self.file.read) as text:
            for number, line in enumerate(text, start=1):
                try:
                    value = json.loads(line) if line.strip() else {}
                    fault = "" if isinstance(value, dict) else "a JSON object was expected"
                except RecursionError:  # DuckDB reads it
                    continue
                except ValueError as error:
                    fault = f"not JSON: {error}"
                if fault:
                    shown = repr(line.strip()[:60])
                    advice = "mend it, or leave such records out with --on-bad skip"
                    message = f"{Reason.MALFORMED.value}: {fault}: {shown}"
                    raise DataError(message, path=self.file.path, line=number, advice=advice) from None

    def lines(self, records: Collection[int], rejects: Collection[int] = ()) -> Lines:
        """Find the lines of records; every line that isn't blank is one."""
        found: dict[int, int] = {}
        with open_text(self.file.read) as text:
            full = (number for number, line in enumerate(text, start=1) if line.strip())
            for record, number in enumerate(full):
                if record in records:
                    found[record] = number
                if len(found) == len(records):
                    break
        return found, {}


_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_UNPACKED, _TIMES = 64 << 30, 1000  # the bytes that any file may unpack to, and how many times its size


class ParquetScan(Scan):
    """A Parquet file."""

    def _table(self, lists: Mapping[str, bool], *, skip: bool) -> str:
        return f"read_parquet({sql_text(str(self._plain))}, hive_partitioning=false)"

    @cached_property
    def _types(self) -> Mapping[str, pa.DataType]:
        """The columns and their types, as DuckDB reads them."""
        with contextlib.suppress(OSError, pa.ArrowException), self.file.read.open("rb") as file:
            self._check_names(pq.read_schema(file).names)
        query = f"SELECT * FROM {self._table({}, skip=False)} LIMIT 0"
        with explain_errors(self.file.path, self._plain):
            schema = self._connection.sql(query).to_arrow_table().schema
        return {field.name: field.type for field in schema}

    def _check_names(self, names: Sequence[str]) -> None:
        # DuckDB would give one of two columns with the same name another one.
        check_names(names, "the file has")

    @cached_property
    def _metadata(self) -> pq.FileMetaData:
        try:
            with self.file.read.open("rb") as file:
                return pq.read_metadata(file)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"can't be read: {first_line(error)}", path=self.file.path) from error

    def headers(self) -> Sequence[tuple[str, ...]]:
        """Return the names of the columns."""
        return [tuple(self._types)]

    def has(self, source: str) -> bool:
        """Return whether the file has a column."""
        return source in self._types

    def type_of(self, source: str) -> pa.DataType:
        """Return a column's type."""
        return self._types[source]

    def count(self) -> int:
        """Return the number of records in the file's metadata."""
        return int(self._metadata.num_rows)

    def _place(self, record: int) -> str:
        return f"{self.file.path}, row {record + 1}"

    def is_empty(self, source: str) -> bool:
        """Return whether a column is known to have no value, by the file's statistics."""
        return source in self._empty

    @cached_property
    def _empty(self) -> frozenset[str]:
        full: set[str] = set()
        for name, column in self._chunks():
            stats = column.statistics
            if stats is None or not stats.has_null_count or stats.null_count < column.num_values:
                full.add(name)
        schema = self._metadata.schema.to_arrow_schema()  # DuckDB reads a column of type null as INT32
        nulls = {field.name for field in schema if pa.types.is_null(field.type)}
        return frozenset(self._types) - (full - nulls)

    def _chunks(self) -> Iterator[tuple[str, pq.ColumnChunkMetaData]]:
        """Yield the parts of columns, each with its column's name."""
        for group in map(self._metadata.row_group, range(self._metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                path = column.path_in_schema
                yield path if path in self._types else path.partition(".")[0], column

    def refuse_unpacked(self, sources: Collection[str]) -> None:
        """Refuse a file in which some columns unpack to far more than its size.

        Args:
          sources: The columns that will be read.

        Raises:
          DataError: Some columns unpack to far more than the file's size.
        """
        size, coded = 0, set[str]()
        for name, column in self._chunks():
            if name in sources and name in self._types:
                width = _WIDTHS.get(column.physical_type)
                size += column.num_values * width if width else column.total_uncompressed_size
                if is_text(self._types[name]) and "DICTIONARY" in " ".join(column.encodings):
                    coded.add(name)  # a long text may be repeated without taking space
        if coded:
            sums = " + ".join(f"coalesce(sum(strlen({sql_name(name)})), 0)" for name in sorted(coded))
            with self._surveying() as cursor:  # DuckDB reads each text of a dictionary once
                query = f"SELECT {sums} FROM {self._table({}, skip=False)}"
                size += int(cursor.execute(query).fetchall()[0][0])
        there = self.file.path.stat().st_size
        if size > max(_UNPACKED, _TIMES * there):
            raise DataError(
                f"its {there:,} bytes unpack to {size:,}, more than {_TIMES:,} times as many",
                path=self.file.path,
                advice="leave out its columns of long texts and lists by --spec, or leave out the file",
            )
