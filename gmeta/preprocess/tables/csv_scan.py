"""Reading of a file of separated fields."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from gmeta.core.errors import DataError
from gmeta.preprocess.bad_records import Reason
from gmeta.preprocess.table_spec import TableSpec
from gmeta.preprocess.tables.duckdb_text import one_line, sql_text
from gmeta.preprocess.tables.table_files import csv_delimiter, csv_names
from gmeta.preprocess.tables.table_scan import Lines, Reject, Scan, estimate_lines, open_text

if TYPE_CHECKING:
    import duckdb

_FIELDS = re.compile(r"Expected Number of Columns: (\d+) Found: (\d+)")
_REASONS = {
    "MISSING COLUMNS": Reason.MISSING_FIELD,
    "TOO MANY COLUMNS": Reason.EXTRA_FIELD,
}


class CsvScan(Scan):
    """A file of separated fields."""

    def table(self, spec: TableSpec | None, *, skip: bool) -> str:
        """Return the table in SQL, all fields as text; lines with too few or too many become `rejects`."""
        columns = ", ".join(f"{sql_text(name)}: 'VARCHAR'" for name in self.names())
        kinds = f"auto_detect=false, columns={{{columns}}}, store_rejects=true"
        if spec is None:
            kinds = f"names=[{', '.join(map(sql_text, self.names()))}], ignore_errors=true"
        quote, delimiter = sql_text(self._form.quote), sql_text(csv_delimiter(self.file.path, self._form))
        return (
            f"read_csv({sql_text(str(self._plain))}, header={str(self._form.header).lower()}, "
            f"delim={delimiter}, quote={quote}, escape={quote}, hive_partitioning=false, {kinds})"
        )

    @cached_property
    def schema(self) -> pa.Schema:
        """The names in the file, with the types that DuckDB guesses from the first lines."""
        try:
            guessed = self._describe()
        except DataError:
            guessed = None
        if guessed is None or guessed.names != list(self.names()):
            return pa.schema([(name, pa.string()) for name in self.names()])
        return guessed

    def names(self) -> Sequence[str]:
        """Return the names in the first line."""
        return self._names

    @cached_property
    def _names(self) -> list[str]:
        return csv_names(self.file.path, self._form)

    def estimate(self) -> int | None:
        """Estimate the number of records by the length of the first lines."""
        return estimate_lines(self.file.path)

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
            shown = repr((text or "").strip("\r\n").split("\n")[0][:60])
            reason = _REASONS.get(str(kind), Reason.MALFORMED)
            self.rejects.append(Reject(reason, int(line) - 1, f"{message}: {shown}"))
        for table in ("reject_errors", "reject_scans"):
            cursor.execute(f"DROP TABLE {table}")

    def lines(self, records: Collection[int], rejects: Collection[int] = ()) -> Lines:
        """Find lines by reading the file again, as far as needed: fields may span lines."""
        found: dict[int, int] = {}
        refused: dict[int, int] = {}
        bad = {reject.place for reject in self.rejects}
        record, before = -int(self._form.header), 0
        with open_text(self.file.path) as text, contextlib.suppress(csv.Error):
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
