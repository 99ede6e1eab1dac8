"""Rows that are changed before they are stored (`TableShape`), by DuckDB, into one Parquet file.

Each file becomes a Parquet file of its records, with their numbers. A chain of queries over all of them then
makes the table. Text stays text: a scan of the result decides types by all values, as for the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess.plan.normalisation import MISSING
from gmeta.preprocess.table_shape import BLOCK, TableShape
from gmeta.preprocess.table_spec import CsvForm
from gmeta.preprocess.tables.duckdb_text import explain_errors, one_line, sql_name, sql_text
from gmeta.preprocess.tables.parquet_scan import ParquetScan
from gmeta.preprocess.tables.table_files import TableFile
from gmeta.preprocess.tables.table_scan import Scan
from gmeta.preprocess.tables.type_survey import TEXT

if TYPE_CHECKING:
    import duckdb

_FILE, _RECORD = "_gmeta_file", "_gmeta_record"
_ROWS, _PARTS = 1024, 20  # the most rows of a block, and the fewest blocks
_EDGES = ((1e11, 1_000_000), (1e14, 1_000), (1e17, 1))  # numbers below an edge -> microseconds of one
_UNITS = {"s": "1e6", "ms": "1e3", "us": "1", "ns": "1e-3"}


class ShapedScan(ParquetScan):
    """The rows that `shape` made.

    Args:
      path: The Parquet file.
      scans: The scans of the files that its records are from.
      quoted: The columns whose values are text by their type.
      connection: DuckDB.
    """

    def __init__(
        self,
        path: Path,
        scans: Sequence[Scan],
        quoted: frozenset[str],
        connection: duckdb.DuckDBPyConnection,
    ) -> None:
        super().__init__(TableFile(scans[0].file.path, "parquet", plain=path), CsvForm(), connection)
        self._scans = scans
        self.quoted = quoted

    @cached_property
    def _types(self) -> Mapping[str, pa.DataType]:
        query = f"SELECT * EXCLUDE ({_FILE}, {_RECORD}) FROM {self._table({}, skip=False)} LIMIT 0"
        schema = self._connection.sql(query).to_arrow_table().schema
        return {field.name: field.type for field in schema}

    def type_of(self, source: str) -> pa.DataType | str:
        """Return a column's type; `TEXT` if its values were read from text."""
        kind = super().type_of(source)
        return TEXT if pa.types.is_string(kind) and source not in self.quoted else kind

    def is_empty(self, source: str) -> bool:
        """Return False: statistics know nothing of the words for no value."""
        return False

    def locate(self, record: int) -> tuple[Path, int | None, str]:
        """Return the file that a record is from, its line, and words for its place if it has none."""
        query = f"SELECT {_FILE}, {_RECORD} FROM {self._table({}, skip=False)} LIMIT 1 OFFSET {record}"
        place, number = self._connection.cursor().execute(query).fetchall()[0]
        scan = self._scans[place]
        line = scan.lines({number})[0].get(number) if scan.file.is_text else None
        return scan.file.path, line, "" if line else f"row {number + 1}: "

    def _place(self, record: int) -> str:
        path, line, words = self.locate(record)
        return f"{path}:{line}" if line else f"{path}, {words.rstrip(': ')}"


class Shaper:
    """The chain of queries that makes a table's rows.

    Args:
      shape: What is done with them.
      time: The column of times, if there is one.
      task: The column of tasks.
      folder: Where Parquet files are written.
      connection: DuckDB.

    Attributes:
      notes: What each step did, each in a sentence.
    """

    def __init__(
        self,
        shape: TableShape,
        task: str,
        time: str | None,
        folder: Path,
        connection: duckdb.DuckDBPyConnection,
    ) -> None:
        self._shape, self._task, self._time, self._folder = shape, task, time, folder
        self._cursor, self._connection = connection.cursor(), connection
        self._view, self.notes = "", list[str]()
        self._steps = 0

    def run(self, scans: Sequence[Scan], sides: Sequence[Scan]) -> ShapedScan:
        """Make the rows of some files, with those of the side tables.

        Raises:
          ConfigError: A column doesn't exist, or a condition isn't SQL.
          DataError: A file can't be read, or a side table has a key twice.
        """
        parts = [self._copied(scan, number) for number, scan in enumerate(scans)]
        files = ", ".join(sql_text(str(part)) for part in parts)
        shape = self._shape
        self._path = scans[0].file.path
        with explain_errors(self._path):
            self._step(f"SELECT * FROM read_parquet([{files}], union_by_name=true, hive_partitioning=false)")
            self._nulls()
            here = [column for column in shape.lists if column in self._types]
            for column in here:
                self._list(column, shape.lists[column])
            if shape.explode:
                self._explode(shape.explode)
            for column, form in shape.times.items():
                self._times(column, form)
            for number, join in enumerate(shape.joins):
                side = self._copied(sides[number], len(parts) + number)
                self._join(join.on, join.key or join.on, side, sides[number].file.path)
            for column in (column for column in shape.lists if column not in here):
                self._list(column, shape.lists[column])
            self._label()
            if shape.where:
                self._where(shape.where)
            self._distinct()
            self._sessions()
            self._core()
            self._blocks()
            target = self._folder / "shaped.parquet"
            self._cursor.execute(f"COPY {self._view} TO {sql_text(str(target))} (FORMAT parquet)")
        self._cursor.close()
        quoted = frozenset(name for scan in (*scans, *sides) for name in scan.quoted)
        return ShapedScan(target, scans, quoted - {*shape.times}, self._connection)

    def _copied(self, scan: Scan, number: int) -> Path:
        target = self._folder / f"part-{number}.parquet"
        scan.copy(target, number)
        return target

    def _step(self, query: str) -> None:
        self._steps += 1
        self._view = f"gmeta_step_{id(self)}_{self._steps}"
        self._cursor.execute(f"CREATE TEMP VIEW {self._view} AS {query}")

    def _one(self, query: str) -> tuple[Any, ...]:
        return tuple(self._cursor.execute(query).fetchall()[0])

    @property
    def _types(self) -> dict[str, str]:
        described = self._cursor.execute(f"DESCRIBE {self._view}").fetchall()
        return {row[0]: row[1] for row in described if row[0] not in (_FILE, _RECORD)}

    def _name(self, column: str, option: str) -> str:
        """Return a column in SQL."""
        if column not in (types := self._types):
            raise ConfigError(f"{option}: no column {column!r} in the table; it has {', '.join(types)}")
        return sql_name(column)

    def _replace(self, column: str, value: str) -> None:
        self._step(f"SELECT * REPLACE ({value} AS {sql_name(column)}) FROM {self._view}")

    def _nulls(self) -> None:
        texts = [name for name, kind in self._types.items() if kind == "VARCHAR"]
        if not self._shape.null or not texts:
            return
        words = ", ".join(sql_text(word) for word in self._shape.null)
        cases = (
            f"CASE WHEN trim({n}) IN ({words}) THEN NULL ELSE {n} END AS {n}" for n in map(sql_name, texts)
        )
        self._step(f"SELECT * REPLACE ({', '.join(cases)}) FROM {self._view}")

    def _list(self, column: str, separator: str) -> None:
        name = self._name(column, "--list")
        split = f"list_filter(string_split({name}, {sql_text(separator)}), lambda x: trim(x) <> '')"
        self._replace(column, f"coalesce({split}, [])")
        kind = self._natural(f"(SELECT unnest({name}) AS x FROM {self._view})", "x")
        if kind != "VARCHAR":
            self._replace(column, f"{name}::{kind}[]")

    def _explode(self, column: str) -> None:
        name, shape = self._name(column, "--explode"), self._shape
        values = name if self._types[column].endswith("[]") else f"regexp_extract_all({name}, '\\S+')"
        unnested = f"SELECT * REPLACE (unnest({values}) AS {name}) FROM {self._view}"
        before = self._one(f"SELECT count(*) FROM {self._view}")[0]
        if not shape.parts:
            self._step(unnested)
        else:
            first, second = map(sql_name, shape.parts)
            form = sql_text(f"^(.*){re.escape(shape.between)}(.*?)$")  # the last one separates
            self._step(
                f"SELECT * EXCLUDE ({name}), regexp_extract({name}, {form}, 1) AS {first}, "
                f"nullif(regexp_extract({name}, {form}, 2), '') AS {second} FROM ({unnested})"
            )
        after = self._one(f"SELECT count(*) FROM {self._view}")[0]
        self.notes.append(f"--explode made {after:,} rows of {before:,}")

    def _times(self, column: str, form: str) -> None:
        name = self._name(column, "--time-format")
        text = f"trim({name}::VARCHAR)"
        if form in _UNITS:
            micros = (
                f"CAST(round(TRY_CAST({text} AS DECIMAL(38, 9)) * {_UNITS[form]}::DECIMAL(18, 4)) AS BIGINT)"
            )
        else:
            try:
                self._one(f"SELECT try_strptime('x', {sql_text(form)})")
            except Exception as error:
                raise ConfigError(f"--time-format {form!r}: {one_line(str(error))}") from error
            micros = f"epoch_us(try_strptime({text}, {sql_text(form)}))"
        # What isn't of the format stays as it is, and is bad or refused by its own text.
        iso = f"strftime(make_timestamp({micros}), '%Y-%m-%dT%H:%M:%S.%f')"
        wrong = self._one(
            f"SELECT count(*), count(*) FILTER (WHERE {micros} IS NULL), "
            f"min({text}) FILTER (WHERE {micros} IS NULL) FROM {self._view} WHERE {name} IS NOT NULL"
        )
        if wrong[0] and wrong[0] == wrong[1]:
            raise ConfigError(
                f"--time-format {form!r}: no value of {column!r} is of it, such as {wrong[2]!r}"
            )
        self._replace(column, f"CASE WHEN {micros} IS NULL THEN {name}::VARCHAR ELSE {iso} END")

    def _join(self, on: str, key: str, side: Path, path: Path) -> None:
        name, mine = self._name(on, "--on"), self._types
        table = f"read_parquet({sql_text(str(side))})"
        there = [row[0] for row in self._cursor.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
        there = [column for column in there if column not in (_FILE, _RECORD)]
        if key not in there:
            raise ConfigError(
                f"--on {on}: no column {key!r} in {path}; it has {', '.join(there)}; "
                f"write --on {on}=NAME if it has another name there"
            )
        text = f"trim({sql_name(key)}::VARCHAR)"
        twice = self._cursor.execute(
            f"SELECT {text}, count(*) FROM {table} WHERE {sql_name(key)} IS NOT NULL "
            f"GROUP BY ALL HAVING count(*) > 1 ORDER BY ALL LIMIT 1"
        ).fetchall()
        if twice:
            raise DataError(
                f"{key} {twice[0][0]!r} is in {twice[0][1]} rows, and a side table has one for each",
                path=path,
                advice="leave the others out",
            )
        taken = {column.lower() for column in mine}
        selected, renamed = [], []
        for column in (one for one in there if one != key):
            new = f"{path.name.partition('.')[0]}_{column}" if column.lower() in taken else column
            renamed += [f"{column} as {new}"] if new != column else []
            selected.append(f"s.{sql_name(column)} AS {sql_name(new)}")
        columns = ", ".join(["t.*", *selected])
        lacking, example, rows = self._one(
            f"SELECT count(*), min(t.{name}), (SELECT count(*) FROM {self._view}) "
            f"FROM {self._view} t ANTI JOIN {table} s "
            f"ON trim(t.{name}::VARCHAR) = trim(s.{sql_name(key)}::VARCHAR)"
        )
        if lacking == rows:
            raise ConfigError(f"--on {on}: no row of the table has a {key} of {path}, such as {example!r}")
        if lacking:
            self.notes.append(
                f"{lacking:,} of {rows:,} rows have a {on} that {path.name} lacks, such as {example!r}: "
                "their columns of it have no value (--default)"
            )
        if renamed:
            self.notes.append(f"{path.name}: its column {', '.join(renamed)}")
        self._step(
            f"SELECT {columns} FROM {self._view} t LEFT JOIN {table} s "
            f"ON trim(t.{name}::VARCHAR) = trim(s.{sql_name(key)}::VARCHAR)"
        )

    def _label(self) -> None:
        rule = self._shape.label
        if rule is None:
            return
        if rule.column is None:
            if rule.name in self._types:
                raise ConfigError(f"--label: the table has a column {rule.name!r}: name it, or rename it")
            self._step(f"SELECT *, {rule.values['*']}::DOUBLE AS {sql_name(rule.name)} FROM {self._view}")
            return
        name = self._name(rule.column, "--label")
        number = f"TRY_CAST({name} AS DOUBLE)"
        if rule.compare is not None:
            self._replace(
                rule.column,
                f"CASE WHEN {number} {rule.compare} THEN 1.0 WHEN {number} IS NOT NULL THEN 0.0 END",
            )
            return
        text = f"trim({name}::VARCHAR)"
        cases, matched = [], []
        for value, one in rule.values.items():
            if value != "*":
                test = f"{text} = {sql_text(value)}"
                if value.lstrip("-").replace(".", "", 1).isdecimal():
                    test = f"({test} OR {number} = {value})"
                cases.append(f"WHEN {test} THEN {one}")
                matched.append(test)
        if "*" not in rule.values:
            others = self._cursor.execute(
                f"SELECT DISTINCT {text} FROM {self._view} WHERE NOT coalesce({' OR '.join(matched)}, TRUE) "
                "ORDER BY 1 LIMIT 4"
            ).fetchall()
            if others:
                shown = ", ".join(repr(row[0]) for row in others)
                raise ConfigError(
                    f"--label: {rule.column} has other values, such as {shown}: add *=0, or each"
                )
        rest = f"ELSE {rule.values['*']}" if "*" in rule.values else ""
        label = f"CASE WHEN {name} IS NULL THEN NULL {' '.join(cases)} {rest} END::DOUBLE"
        self._replace(rule.column, label)

    def _natural(self, table: str, name: str) -> str:
        """Return the type that all values of a column of text have."""
        words = ", ".join(sql_text(word) for word in sorted(MISSING))
        whole, any_, floats = self._one(
            f"SELECT coalesce(bool_and(coalesce(TRY_CAST({name} AS BIGINT)::VARCHAR = trim({name}), FALSE)), "
            f"FALSE), count(*), coalesce(bool_and(TRY_CAST({name} AS DOUBLE) IS NOT NULL AND "
            f"NOT regexp_matches({name}, '^\\s*[+-]?0[0-9]')), FALSE) "
            f"FROM {table} WHERE {name} IS NOT NULL AND lower(trim({name})) NOT IN ({words})"
        )
        return "BIGINT" if any_ and whole else "DOUBLE" if any_ and floats else "VARCHAR"

    def _where(self, condition: str) -> None:
        for column, kind in self._types.items():
            if kind == "VARCHAR" and column.lower() in condition.lower():
                natural = self._natural(self._view, sql_name(column))
                if natural != "VARCHAR":
                    self._replace(column, f"TRY_CAST({sql_name(column)} AS {natural})")
        before = self._one(f"SELECT count(*) FROM {self._view}")[0]
        there = ", ".join(self._types)
        try:
            self._step(f"SELECT * FROM {self._view} WHERE ({condition})")
            after = self._one(f"SELECT count(*) FROM {self._view}")[0]
        except Exception as error:
            raise ConfigError(
                f"--where {condition!r}: {one_line(str(error))}; columns are {there}"
            ) from error
        self._left_out("--where", before, after)

    def _left_out(self, option: str, before: int, after: int) -> None:
        if not after:
            raise ConfigError(f"{option} leaves no row of {before:,}")
        self.notes.append(f"{option} keeps {after:,} of {before:,} rows")

    def _micros(self, column: str) -> str:
        """Return a time in microseconds, in SQL."""
        name = sql_name(column)
        number = f"TRY_CAST({name} AS DOUBLE)"
        units = " ".join(f"WHEN abs({number}) < {edge} THEN {number} * {times}" for edge, times in _EDGES)
        date = f"epoch_us(TRY_CAST({name}::VARCHAR AS TIMESTAMPTZ))"
        return f"(CASE {units} WHEN {number} IS NOT NULL THEN {number} / 1000 ELSE {date} END)"

    def _distinct(self) -> None:
        columns = self._shape.distinct
        if not columns:
            return
        names = [*self._types] if "*" in columns else list(columns)
        keys = ", ".join(self._name(column, "--distinct") for column in names)
        order = [self._micros(self._time)] if self._time in self._types else []
        order += [_FILE, _RECORD]
        before = self._one(f"SELECT count(*) FROM {self._view}")[0]
        self._step(
            f"SELECT * FROM {self._view} "
            f"QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY {', '.join(order)}) = 1"
        )
        self._left_out("--distinct", before, self._one(f"SELECT count(*) FROM {self._view}")[0])

    def _sessions(self) -> None:
        column = self._shape.session
        if column is None:
            return
        if self._time is None:
            raise ConfigError("--sessions: name the column of times by --time")
        if "session" in self._types:
            raise ConfigError("--sessions makes a column 'session', and the table has one: rename it")
        name = self._name(column, "--sessions")
        self._name(self._time, "--time")
        micros, order = self._micros(self._time), f"ORDER BY gmeta_t, {_FILE}, {_RECORD}"
        timed = f"SELECT *, {micros} AS gmeta_t FROM {self._view}"
        begun = (
            f"SELECT *, (gmeta_t - lag(gmeta_t) OVER (PARTITION BY {name} {order}) > "
            f"{self._shape.gap * 1e6:.0f})::INT AS gmeta_new FROM ({timed})"
        )
        self._step(
            f"SELECT * EXCLUDE (gmeta_t, gmeta_new), {name}::VARCHAR || '-' || (coalesce(sum(gmeta_new) "
            f"OVER (PARTITION BY {name} {order}), 0) + 1)::BIGINT::VARCHAR AS session FROM ({begun})"
        )

    def _core(self) -> None:
        core = self._shape.core
        if not core:
            return
        names = {self._name(column, "--core"): least for column, least in core.items()}
        table = f"{self._view}_core"
        self._cursor.execute(f"CREATE TEMP TABLE {table} AS SELECT {', '.join(names)} FROM {self._view}")
        before = left = self._one(f"SELECT count(*) FROM {table}")[0]
        while True:
            for name, least in names.items():
                self._cursor.execute(
                    f"DELETE FROM {table} WHERE {name} IS NULL OR {name} IN "
                    f"(SELECT {name} FROM {table} GROUP BY {name} HAVING count(*) < {least})"
                )
            if (now := self._one(f"SELECT count(*) FROM {table}")[0]) == left:
                break
            left = now
        kept = " AND ".join(f"{name} IN (SELECT {name} FROM {table})" for name in names)
        self._step(f"SELECT * FROM {self._view} WHERE {kept}")
        self._left_out("--core", before, left)

    def _blocks(self) -> None:
        if not self._shape.blocks:
            return
        types = self._types
        if BLOCK in types:
            raise ConfigError(f"the table has a column {BLOCK!r}: name the task by --task, or rename it")
        label = self._shape.label.name if self._shape.label else None
        filled, gaps = [], []
        for column, kind in types.items():
            name = sql_name(column)
            if (
                column in (label, self._time)
                or not self._one(
                    f"SELECT count(*) FROM {self._view} WHERE {name} IS NULL OR trim({name}::VARCHAR) = ''"
                )[0]
            ):
                continue
            own = "''"
            if kind == "VARCHAR":
                natural = self._natural(self._view, name)
                kind = natural if natural != "VARCHAR" else kind
            if kind in ("BIGINT", "INTEGER"):
                least = self._one(f"SELECT least(min(TRY_CAST({name} AS BIGINT)), 0) - 1 FROM {self._view}")[
                    0
                ]
                own = f"{least}"
            elif kind != "VARCHAR":
                continue  # no number stands for a gap among fractions: --default
            if self._one(f"SELECT count(nullif(trim({name}::VARCHAR), '')) FROM {self._view}")[0]:
                filled.append(
                    f"coalesce(nullif({name}::VARCHAR, ''), {sql_text(own.strip(chr(39)))}) AS {name}"
                )
                gaps.append(column if own == "''" else f"{column} ({own})")
        total = self._one(f"SELECT count(*) FROM {self._view}")[0]
        size = min(_ROWS, max(-(-total // _PARTS), 1))
        replaced = f" REPLACE ({', '.join(filled)})" if filled else ""
        self._step(
            f"SELECT *{replaced}, (row_number() OVER (ORDER BY {_FILE}, {_RECORD}) - 1) // {size} "
            f"AS {BLOCK} FROM {self._view}"
        )
        self.notes.append(f"no --task: blocks of {size:,} rows take the place of tasks, column {BLOCK!r}")
        if gaps:
            shown = ", ".join(gaps[:6]) + (f" and {len(gaps) - 6} more" if len(gaps) > 6 else "")
            self.notes.append(f"gaps are a value of their own: {shown}")
