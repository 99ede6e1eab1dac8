"""Reading of a file of JSON lines."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Collection, Generator, Sequence
from typing import Any

import pyarrow as pa

from gmeta.core.errors import DataError
from gmeta.preprocess.bad_records import Reason
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec, check_names
from gmeta.preprocess.tables.duckdb_text import sql_text
from gmeta.preprocess.tables.table_scan import Lines, Scan, estimate_lines, open_text

_HEAD = 100  # number of lines whose keys are checked


class JsonScan(Scan):
    """A file of JSON lines."""

    def table(self, spec: TableSpec | None, *, skip: bool) -> str:
        """Return the table in SQL, values as text: `normalise` makes each a number, or a fault."""
        options = "format='newline_delimited', hive_partitioning=false"
        if spec is None:
            return f"read_json({sql_text(str(self._plain))}, {options}, ignore_errors=true)"
        kinds = {source: spec.columns[name].is_list for name, source in spec.sources.items()}
        columns = ", ".join(
            f"{sql_text(name)}: '{'JSON' if many else 'VARCHAR'}'" for name, many in kinds.items()
        )
        options += f", columns={{{columns}}}, ignore_errors={str(skip).lower()}"
        return f"read_json({sql_text(str(self._plain))}, {options})"

    def _describe(self) -> pa.Schema:
        names: dict[str, None] = {}
        with open_text(self.file.path) as text, contextlib.suppress(ValueError, OSError):
            for line in itertools.islice(text, _HEAD):
                record = json.loads(line) if line.strip() else {}
                names.update(dict.fromkeys(record if isinstance(record, dict) else ()))
        check_names(list(names), "the file has")
        return super()._describe()

    def estimate(self) -> int | None:
        """Estimate the number of records by the length of the first lines."""
        return estimate_lines(self.file.path)

    def names(self) -> Sequence[str]:
        """Accept any name: a column that a line lacks is null."""
        return _Everything()

    def column(self, source: str, column: ColumnSpec, *, hashed: bool) -> str:
        """Return a column's value in SQL; a value that should be a list becomes [null], which is bad."""
        name = super().column(source, column, hashed=hashed)
        if not column.is_list:
            return name
        return (
            f"CASE json_type({name}) WHEN 'ARRAY' THEN {name}::VARCHAR[] WHEN 'NULL' THEN NULL "
            f"ELSE CASE WHEN {name} IS NOT NULL THEN [NULL::VARCHAR] END END"
        )

    def batches(self, spec: TableSpec, *, skip: bool) -> Generator[pa.RecordBatch, None, None]:
        """Yield the records as `Scan.batches` does."""
        try:
            yield from super().batches(spec, skip=skip)
        except DataError as error:
            if "JSON" in str(error):
                self._find_malformed()
            raise

    def _find_malformed(self) -> None:
        """Raise an error with the malformed line's number; DuckDB's is off by the blank lines and one."""
        with open_text(self.file.path) as text:
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
        """Find the lines of records; every line that isn't blank is one."""
        found: dict[int, int] = {}
        with open_text(self.file.path) as text:
            full = (number for number, line in enumerate(text, start=1) if line.strip())
            for record, number in enumerate(full):
                if record in records:
                    found[record] = number
                if len(found) == len(records):
                    break
        return found, {}


class _Everything(Sequence[str]):
    """A sequence that contains every name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, place: Any) -> Any:
        raise IndexError(place)

    def __len__(self) -> int:
        return 0
