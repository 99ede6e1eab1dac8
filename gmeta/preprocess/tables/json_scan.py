"""The scan of a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from gmeta.core.errors import DataError
from gmeta.preprocess.source import Reason
from gmeta.preprocess.table_spec import ColumnSpec, Role
from gmeta.preprocess.tables.duckdb_text import (
    sql_text,
)
from gmeta.preprocess.tables.recognition import open_text
from gmeta.preprocess.tables.record_count import Records, count_lines
from gmeta.preprocess.tables.table_scan import Lines, Scan
from gmeta.preprocess.tables.type_survey import JSON, Probe

if TYPE_CHECKING:
    pass


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
        """Return what `survey` and `find` need of a column."""
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
        """Raise an error with the malformed line's number; DuckDB's is off by the blank lines and one."""
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
