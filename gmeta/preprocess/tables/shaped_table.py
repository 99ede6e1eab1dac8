"""Makes the rows that a `Shape` describes with DuckDB, as a Parquet file that is read in place of the files.

Values keep their forms: fields of CSV files stay text and values of JSON stay JSON, so that all remaining
rows decide the types (`table_survey`). A row stores the file and the record that it comes from.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError, first_line
from gmeta.preprocess.plan.column_types import unit_of
from gmeta.preprocess.plan.column_values import MISSING
from gmeta.preprocess.shape_spec import SESSION, Explode, Join
from gmeta.preprocess.source import Ints
from gmeta.preprocess.table_spec import RESERVED, TIME_UNITS, ColumnSpec, TableSpec
from gmeta.preprocess.tables.duckdb_text import sql_name, sql_text
from gmeta.preprocess.tables.recognition import Copy, TableFile
from gmeta.preprocess.tables.structured_scan import ParquetScan, json_list
from gmeta.preprocess.tables.table_scan import Scan
from gmeta.preprocess.tables.table_survey import merge_names
from gmeta.preprocess.tables.type_survey import JSON, TEXT

if TYPE_CHECKING:
    import duckdb

_FILE, _RECORD, _ELEMENT = f"{RESERVED}file", f"{RESERVED}record", f"{RESERVED}element"
PLACE = (_FILE, _RECORD, _ELEMENT)
"""The columns of `ShapedScan.batches` with a row's file, its record there, and the element of the list there.

Without an exploded list, the element is 0."""
_ROWS, _SIDE = f"{RESERVED}rows", f"{RESERVED}side"


class ShapedScan(ParquetScan):
    """The rows that a `Shape` makes.

    Args:
      copy: The Parquet file.
      forms: Column -> `TEXT` or `JSON`; others have the file's types.
      columns: The files' own descriptions of columns.
      origins: The files' scans.
      connection: DuckDB.
    """

    def __init__(
        self,
        copy: Copy,
        forms: Mapping[str, str],
        columns: Mapping[str, ColumnSpec],
        origins: Sequence[Scan],
        connection: duckdb.DuckDBPyConnection,
    ) -> None:
        first = origins[0].file
        super().__init__(
            TableFile(first.path, first.format, columns=columns, copy=copy, by_line=False), connection
        )
        self._forms, self._origins = forms, origins

    def headers(self) -> Sequence[tuple[str, ...]]:
        """Return the names of the columns."""
        return [tuple(name for name in self._types if not name.startswith(RESERVED))]

    def type_of(self, source: str) -> pa.DataType | str:
        """Return a column's type."""
        return self._forms.get(source) or super().type_of(source)

    def _check_names(self, names: Sequence[str]) -> None:
        """Do nothing: the names are of files that were checked."""

    def refuse_unpacked(self, sources: Collection[str]) -> None:
        """Do nothing: gmeta wrote the file."""

    def _column(self, source: str, column: ColumnSpec, *, hashed: bool) -> str:
        value = self._value(source)
        if self._forms.get(source) == JSON:
            if column.is_list:
                return json_list(value)
            value = _plain(value, JSON)
        return f"md5_number_lower({value})" if hashed else value

    def _read(
        self, values: Mapping[str, str], lists: Mapping[str, bool], *, skip: bool
    ) -> Generator[pa.RecordBatch, None, None]:
        yield from super()._read({**values, **{name: name for name in PLACE}}, lists, skip=skip)

    def origins(self, records: Collection[int]) -> dict[int, tuple[Scan, int]]:
        """Return the origins of some records: number -> scan, and the record's number in it."""
        if not records:
            return {}
        wanted, table = ", ".join(map(str, sorted(records))), self._table({}, skip=False)
        numbered = f"SELECT row_number() OVER () - 1 AS n, {_FILE} AS f, {_RECORD} AS r FROM {table}"
        with closing(self._connection.cursor()) as cursor:
            found = cursor.execute(f"SELECT n, f, r FROM ({numbered}) WHERE n IN ({wanted})").fetchall()
        return {n: (self._origins[f], r) for n, f, r in found}

    def _place(self, record: int) -> str:
        scan, own = self.origins([record])[record]
        return scan._place(own)


@dataclass
class _Rows:
    """A table of DuckDB: its name, and column -> form or None."""

    name: str
    forms: dict[str, str | None]


class Shaping:
    """The making of rows.

    Args:
      scans: The files' scans, all of one format.
      spec: The columns; its shape describes the rows.
      connection: DuckDB.

    Attributes:
      notes: Decisions that may surprise the user.
    """

    def __init__(self, scans: Sequence[Scan], spec: TableSpec, connection: duckdb.DuckDBPyConnection) -> None:
        self._scans, self._spec, self._shape = scans, spec, spec.shape
        self._sql = connection
        self.notes: list[str] = []
        if len({scan.file.format for scan in scans}) > 1:
            raise ConfigError(
                "files of several formats can't be joined, exploded or filtered together: prepare one format"
            )

    def run(self, batches: Iterator[tuple[int, Ints, pa.RecordBatch]], sides: Sequence[Scan]) -> ShapedScan:
        """Make the rows.

        Args:
          batches: Number of a file, numbers of records, and records as `Scan.raw_batches` reads them.
          sides: The scans of the shape's joins.

        Raises:
          ConfigError: A column doesn't exist, or a condition isn't one.
          DataError: A side table's key occurs twice, or no row is left.
        """
        rows = self._load(batches)
        if self._shape.explode is not None:
            self._explode(rows, self._shape.explode)
        for join, scan in zip(self._shape.joins, sides, strict=True):
            self._join(rows, join, scan)
        if self._shape.where is not None:
            self._filter(rows, self._shape.where)
        if self._shape.distinct:
            self._distinct(rows, self._shape.distinct)
        if self._shape.core:
            self._core(rows, self._shape.core)
        if self._shape.gap_seconds:
            self._sessions(rows, self._shape.gap_seconds)
        if not self._count(rows):
            raise DataError("no row is left after the filters", path=self._scans[0].file.path)
        copy = Copy("rows.parquet")
        order = f"ORDER BY {', '.join(PLACE)}"
        self._run(f"COPY (SELECT * FROM {rows.name} {order}) TO {sql_text(str(copy.path))} (FORMAT parquet)")
        self._run(f"DROP TABLE {rows.name}")
        forms = {name: form for name, form in rows.forms.items() if form is not None}
        columns = {
            name: column
            for scan in (*sides, *self._scans)
            for name, column in scan.file.columns.items()
            if name in rows.forms
        }
        return ShapedScan(copy, forms, columns, self._scans, self._sql)

    def _run(self, query: str, what: str = "") -> list[tuple[Any, ...]]:
        import duckdb

        try:
            return self._sql.execute(query).fetchall()
        except (duckdb.BinderException, duckdb.ParserException, duckdb.ConversionException) as error:
            raise ConfigError(f"{what or 'the rows'}: {first_line(error)}") from error

    def _count(self, rows: _Rows) -> int:
        return int(self._run(f"SELECT count(*) FROM {rows.name}")[0][0])

    def _replace(self, rows: _Rows, query: str, what: str = "") -> None:
        """Replace the rows by a query's result."""
        self._run(f"CREATE TEMP TABLE {RESERVED}next AS {query}", what)
        self._run(f"DROP TABLE {rows.name}")
        self._run(f"ALTER TABLE {RESERVED}next RENAME TO {rows.name}")

    def _load(self, batches: Iterator[tuple[int, Ints, pa.RecordBatch]]) -> _Rows:
        names = [name for name in raw_names(self._scans) if name]
        rows = _Rows(_ROWS, {name: form_of(self._scans, name) for name in names})
        for number, (file, records, batch) in enumerate(batches):
            count = batch.num_rows
            table = pa.table(
                {
                    **{
                        name: batch.column(name) if name in batch.schema.names else pa.nulls(count)
                        for name in names
                    },
                    _FILE: pa.array([file] * count, pa.int32()),
                    _RECORD: pa.array(records),
                    _ELEMENT: pa.array(np.zeros(count, np.int64)),
                }
            )
            self._sql.register(f"{RESERVED}batch", table)
            types = ", ".join(
                f"{sql_name(n)}::VARCHAR AS {sql_name(n)}" if rows.forms[n] else sql_name(n) for n in names
            )
            query = f"SELECT {types}, {', '.join(PLACE)} FROM {RESERVED}batch"
            if number:
                self._run(f"INSERT INTO {rows.name} BY NAME {query}")
            else:
                self._run(f"CREATE OR REPLACE TEMP TABLE {rows.name} AS {query}")
            self._sql.unregister(f"{RESERVED}batch")
        if not rows.forms or not self._run(
            f"SELECT 1 FROM duckdb_tables() WHERE table_name = {sql_text(_ROWS)}"
        ):
            raise DataError("there is no row in it", path=self._scans[0].file.path)
        return rows

    def _check(self, rows: _Rows, column: str, what: str) -> None:
        if column not in rows.forms:
            raise ConfigError(f"{what}: no column {column!r} in the table; it has {', '.join(rows.forms)}")

    def _typed(self, rows: _Rows, column: str) -> str:
        """Return a column in SQL, as whole numbers, numbers, times or text: what all its values allow."""
        form = rows.forms[column]
        if form is None:
            return sql_name(column)
        value = f"trim({_plain(sql_name(column), form)})"
        words = ", ".join(sorted(map(sql_text, MISSING)))
        given = f"CASE WHEN lower({value}) NOT IN ({words}) THEN {value} END"
        casts = [f"TRY_CAST({given} AS {kind})" for kind in ("BIGINT", "DOUBLE", "TIMESTAMP")]
        asked = ", ".join(f"bool_and(({given}) IS NULL OR {cast} IS NOT NULL)" for cast in casts)
        fits = self._run(f"SELECT {asked} FROM {rows.name}")[0]
        return next(
            (cast for cast, fit in zip(casts, fits, strict=True) if fit), _plain(sql_name(column), form)
        )

    def _encoded(self, rows: _Rows, text: str) -> str:
        """Return text in SQL in the form of the rows' columns."""
        form = next(iter(rows.forms.values()), TEXT)
        if form == JSON:
            number = f"regexp_full_match({text}, '-?(0|[1-9][0-9]*)(\\.[0-9]+)?')"
            return f"CASE WHEN {number} THEN {text} ELSE to_json({text})::VARCHAR END"
        return text

    def _native(self, rows: _Rows, columns: Sequence[str]) -> None:
        """Give columns of text the types that their values allow, if the rows have types."""
        if any(form is None for form in rows.forms.values()):
            for column in columns:
                rows.forms[column] = TEXT
            typed = ", ".join(f"{self._typed(rows, column)} AS {sql_name(column)}" for column in columns)
            self._replace(rows, f"SELECT * REPLACE ({typed}) FROM {rows.name}")
            rows.forms |= dict.fromkeys(columns)

    def _explode(self, rows: _Rows, explode: Explode) -> None:
        what = f"--explode {explode.column}"
        self._check(rows, explode.column, what)
        name, form = sql_name(explode.column), rows.forms[explode.column]
        if taken := [one for one in explode.names if one in rows.forms and one != explode.column]:
            raise ConfigError(f"{what}: there is a column {taken[0]!r} already: name another one")
        split = r"\s+" if explode.separator is None else explode.separator
        function = "string_split_regex" if explode.separator is None else "string_split"
        text = _plain(name, form or TEXT)
        lists = f"{function}(nullif(trim({text}), ''), {sql_text(split)})"
        if form == JSON:
            lists = f"CASE WHEN json_type({name}) = 'ARRAY' THEN {name}::JSON::VARCHAR[] ELSE {lists} END"
        elif form is None and pa.types.is_nested(self._arrow_type(rows, explode.column)):
            lists = f"{name}::VARCHAR[]"
        one = f"{RESERVED}one"
        elements = (
            f"(SELECT * REPLACE (unnest(range(len({one}))) AS {_ELEMENT}, unnest({one}) AS {one}) FROM "
            f"(SELECT *, {lists} AS {one} FROM {rows.name}))"
        )
        parts = ", ".join(map(sql_text, explode.names))
        whole = (
            f"{{{sql_text(explode.names[0])}: {one}}}"
            if len(explode.names) == 1
            else f"regexp_extract({one}, {sql_text(f'^{explode.pattern}$')}, [{parts}])"
        )
        columns = ", ".join(
            f"{self._encoded(rows, f'{RESERVED}x[{sql_text(part)}]')} AS {sql_name(part)}"
            for part in explode.names
        )
        before = self._count(rows)
        self._replace(
            rows,
            f"SELECT * EXCLUDE ({name}, {RESERVED}x), {columns} FROM "
            f"(SELECT * EXCLUDE ({one}), {whole} AS {RESERVED}x FROM {elements})",
            what,
        )
        form = rows.forms.pop(explode.column)
        rows.forms |= dict.fromkeys(explode.names, form)
        if form is None:
            self._native(rows, explode.names)
        self.notes.append(f"{explode.column!r}: {before:,} rows with lists became {self._count(rows):,} rows")

    def _arrow_type(self, rows: _Rows, column: str) -> pa.DataType:
        query = f"SELECT {sql_name(column)} FROM {rows.name} LIMIT 0"
        return self._sql.sql(query).to_arrow_table().schema.field(0).type

    def _join(self, rows: _Rows, join: Join, scan: Scan) -> None:
        own, other = join.keys
        what = f"--join {join.file} --on {join.on}"
        self._check(rows, own, what)
        side = _Rows(_SIDE, {name: form_of([scan], name) for name in raw_names([scan]) if name})
        self._check(side, other, what)
        for number, batch in enumerate(scan.raw_batches([*side.forms])):
            self._sql.register(f"{RESERVED}batch", batch)
            query = f"SELECT * FROM {RESERVED}batch"
            self._run(
                f"INSERT INTO {_SIDE} {query}"
                if number
                else f"CREATE OR REPLACE TEMP TABLE {_SIDE} AS {query}"
            )
            self._sql.unregister(f"{RESERVED}batch")
        if scan.rejects:
            place = scan.rejects[0].place
            raise DataError(
                scan.rejects[0].message,
                path=scan.file.path,
                line=scan.lines((), [place])[1].get(place),
                advice="mend the side table, all of whose rows count",
            )
        left, right = self._typed(rows, own), self._typed(side, other)
        keys = f"SELECT ({right})::VARCHAR AS k FROM {_SIDE} WHERE k IS NOT NULL"
        twice = self._run(f"{keys} GROUP BY k HAVING count(*) > 1 LIMIT 1")
        if twice:
            raise DataError(
                f"{other} {twice[0][0]!r} occurs twice, and each key of a side table must be of one row",
                path=scan.file.path,
            )
        stem = Path(join.file).name.partition(".")[0]
        names = {n: n if n not in rows.forms else f"{stem}_{n}" for n in side.forms if n != other}

        def value(name: str) -> str:
            column, form = f"s.{sql_name(name)}", side.forms[name]
            main = next(iter(rows.forms.values()))
            if form == main or (form is None and main is None):
                return column
            plain = _plain(column, form or TEXT)
            return self._encoded(rows, f"({plain})::VARCHAR") if main is not None else plain

        columns = "".join(f", {value(n)} AS {sql_name(new)}" for n, new in names.items())
        self._replace(
            rows,
            f"SELECT r.* EXCLUDE ({RESERVED}key){columns} FROM (SELECT *, ({left})::VARCHAR AS {RESERVED}key "
            f"FROM {rows.name}) r LEFT JOIN (SELECT *, ({right})::VARCHAR AS {RESERVED}key FROM {_SIDE}) s "
            f"ON r.{RESERVED}key = s.{RESERVED}key",
            what,
        )
        alone = self._run(f"SELECT count(*) FROM {rows.name} WHERE ({left})::VARCHAR NOT IN ({keys})")[0][0]
        if alone:
            self.notes.append(
                f"{join.file}: {alone:,} rows have a {own} that it lacks; its columns are null there"
            )
        main = next(iter(rows.forms.values()))
        rows.forms |= {
            new: main if main is not None else (None if side.forms[n] is None else TEXT)
            for n, new in names.items()
        }
        texts = [new for n, new in names.items() if main is None and side.forms[n] is not None]
        if texts:
            self._native(rows, texts)
        self._run(f"DROP TABLE {_SIDE}")

    def _filter(self, rows: _Rows, where: str) -> None:
        before = self._count(rows)
        named = [name for name in rows.forms if name.lower() in where.lower()]
        typed = "".join(f", {self._typed(rows, name)} AS {sql_name(name)}" for name in named)
        passed = f"SELECT n FROM (SELECT rowid AS n{typed} FROM {rows.name}) WHERE ({where})"
        self._replace(rows, f"SELECT * FROM {rows.name} WHERE rowid IN ({passed})", f"--where {where!r}")
        self._left_out(rows, before, f"where {where}")

    def _left_out(self, rows: _Rows, before: int, why: str) -> None:
        self.notes.append(f"{why}: {before - self._count(rows):,} of {before:,} rows are left out")

    def _order(self, rows: _Rows, columns: Sequence[str]) -> str:
        named = [self._typed(rows, self._spec.time)] if self._spec.time in rows.forms else []
        rest = [f"{sql_name(name)}::VARCHAR" for name in rows.forms if name not in columns]
        return ", ".join([*named, *rest, *PLACE])

    def _distinct(self, rows: _Rows, columns: Sequence[str]) -> None:
        for column in columns:
            self._check(rows, column, "--distinct")
        before = self._count(rows)
        by = ", ".join(map(sql_name, columns))
        first = f"row_number() OVER (PARTITION BY {by} ORDER BY {self._order(rows, columns)}) = 1"
        self._replace(rows, f"SELECT * FROM {rows.name} QUALIFY {first}")
        self._left_out(rows, before, f"distinct {', '.join(columns)}")

    def _core(self, rows: _Rows, core: Mapping[str, int]) -> None:
        for column in core:
            self._check(rows, column, "--core")
        before, count = self._count(rows), -1
        while count != (count := self._count(rows)):
            for column, least in core.items():
                name = sql_name(column)
                self._run(
                    f"DELETE FROM {rows.name} WHERE {name} IS NULL OR {name} IN "
                    f"(SELECT {name} FROM {rows.name} GROUP BY {name} HAVING count(*) < {least})"
                )
        words = ", ".join(f"{column} in {least} rows or more" for column, least in core.items())
        self._left_out(rows, before, words)

    def _sessions(self, rows: _Rows, gap: float) -> None:
        user, time = self._spec.task, self._spec.time
        if time is None or self._spec.blocks:
            raise ConfigError("--session-gap needs --task, the user, and --time")
        for column in (user, time):
            self._check(rows, column, "--session-gap")
        clock = self._clock(rows, time)
        key = f"({self._typed(rows, user)})::VARCHAR"
        order = f"ORDER BY t, {', '.join(PLACE)}"
        starts = f"coalesce(t - lag(t) OVER (PARTITION BY u {order}) > {gap}, false)::INT AS s"
        number = f"sum(s) OVER (PARTITION BY u {order} ROWS UNBOUNDED PRECEDING)"
        session = self._encoded(rows, f"(u || '/' || {number})")
        self._replace(
            rows,
            f"SELECT * EXCLUDE (t, u, s), {session} AS {SESSION} FROM "
            f"(SELECT *, {starts} FROM (SELECT *, {clock} AS t, {key} AS u FROM {rows.name}))",
            "--session-gap",
        )
        rows.forms[SESSION] = next(iter(rows.forms.values()))

    def _clock(self, rows: _Rows, time: str) -> str:
        """Return the time in seconds, in SQL."""
        column = self._spec.columns.get(time, ColumnSpec())
        typed = self._typed(rows, time)
        if column.format is not None and column.format not in TIME_UNITS:
            plain = _plain(sql_name(time), rows.forms[time] or TEXT)
            return f"epoch_us(try_strptime(trim({plain}), {sql_text(column.format)})) / 1e6"
        kind = self._run(f"SELECT typeof({typed}), max({typed}) FROM {rows.name} GROUP BY 1")[0]
        if kind[0].startswith(("TIMESTAMP", "DATE")):
            return f"epoch_us({typed}) / 1e6"
        unit = column.format or (kind[0] in ("BIGINT", "INTEGER", "DOUBLE") and unit_of(int(kind[1])))
        if not unit:
            raise ConfigError(f"--session-gap: the unit of {time!r} isn't known: name it with --time-format")
        return f"({typed}) * {TIME_UNITS[unit] / 1e6}"


def _plain(value: str, form: str) -> str:
    """Return a value's text in SQL."""
    return f"json_extract_string({value}, '$')" if form == JSON else f"({value})::VARCHAR"


def raw_names(scans: Sequence[Scan]) -> tuple[str, ...]:
    """Return the columns of some files."""
    return merge_names(header for scan in scans for header in scan.headers()).all


def form_of(scans: Sequence[Scan], name: str) -> str | None:
    """Return a column's form, None if it has a type."""
    kind = next(scan.type_of(name) for scan in scans if scan.has(name))
    return kind if isinstance(kind, str) else None
