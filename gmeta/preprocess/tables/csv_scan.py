"""Reading of a file of separated fields."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from gmeta.core.errors import DataError
from gmeta.preprocess.bad_records import Reason
from gmeta.preprocess.plan.column_types import NUMBERS, Findings, Seen
from gmeta.preprocess.table_spec import ColumnSpec
from gmeta.preprocess.tables.duckdb_text import one_line, sql_text
from gmeta.preprocess.tables.record_count import Records, count_csv
from gmeta.preprocess.tables.table_files import csv_delimiter, csv_names, open_text
from gmeta.preprocess.tables.table_scan import Lines, Reject, Scan
from gmeta.preprocess.tables.type_survey import TEXT, Probe

if TYPE_CHECKING:
    import duckdb

_LINE, _BUFFER = 2_000_000, 32_000_000  # bytes that DuckDB reads a line of, and at once, by default
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
        # The columns have names of their own: those in the file may be empty, or of any characters.
        columns = ", ".join(f"c{place}: 'VARCHAR'" for place in range(len(self._names)))
        quote, delimiter = sql_text(self._form.quote), sql_text(csv_delimiter(self.file.path, self._form))
        limits = ""
        if self._records.spanning:
            limits = ", parallel=false"
        if (longest := self._records.longest) > _LINE:
            limits += f", max_line_size={longest + 1}, buffer_size={max(2 * longest, _BUFFER)}"
        return (
            f"read_csv({sql_text(str(self._plain))}, header={str(self._form.header).lower()}, "
            f"delim={delimiter}, quote={quote}, escape={quote}, hive_partitioning=false, "
            f"auto_detect=false, columns={{{columns}}}, store_rejects=true{limits})"
        )

    def headers(self) -> Sequence[tuple[str, ...]]:
        """Return the names in the first line; a column without one has an empty name."""
        return [tuple(self._names)]

    def type_of(self, source: str) -> str:
        """Return `TEXT`."""
        return TEXT

    def survey(self, probes: Sequence[Probe]) -> dict[str, Findings]:
        """Find out what values columns have; the name of a column among numbers isn't one.

        It is there where files with a line of names were joined. As a record it is bad.
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
        """Return a column's value in SQL; of a text that is too long for a number, the beginning."""
        value = super()._column(source, column, hashed=hashed)
        long = self._records.longest > _LINE and not (hashed or column.hash or column.is_list)
        return f"left({value}, {_LINE})" if long else value

    def has(self, source: str) -> bool:
        """Return whether the first line names a column."""
        return source in self._places

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self._names)}

    @cached_property
    def _names(self) -> list[str]:
        return csv_names(self.file.path, self._form)

    @cached_property
    def _records(self) -> Records:
        found = count_csv(self.file.path, csv_delimiter(self.file.path, self._form), self._form.quote)
        if found.longest > _LONGEST:
            raise DataError(
                f"it has a record of {found.longest:,} bytes, and at most {_LONGEST:,} can be read",
                path=self.file.path,
                advice="shorten it, or leave it out",
            )
        return found

    def count(self) -> int:
        """Count the records, those that can't be parsed among them."""
        # Where a line is a field, a blank line is an empty one.
        blank = self._records.blank if len(self._names) == 1 else 0
        return self._records.full + blank - self._form.header

    def _check_count(self, rows: int) -> None:
        found = self._records
        if (
            found.unended and rows + len(self.rejects) == self.count() - 1
        ):  # then DuckDB may drop the last one
            place = found.full + found.blank - 1
            self.rejects.append(Reject(Reason.MALFORMED, place, "the file ends within quotes"))
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
