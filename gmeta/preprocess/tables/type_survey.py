"""The survey of all values of a column, in DuckDB, to decide its type.

Each value has a class, an integer of bits of `column_types.Seen`, and a column has the "or" of its values'
classes. A few columns are surveyed by one query over the table. Each expression takes time to plan, so many
columns are read in batches, and one query takes all of a batch's columns together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gmeta.preprocess.plan.column_types import QUOTED, TIME_EDGES, Example, Findings, Seen
from gmeta.preprocess.plan.column_values import DATE, EXACT, INFINITE, MISSING, NUMBER, is_text
from gmeta.preprocess.table_spec import ColumnSpec, Role, is_list
from gmeta.preprocess.tables.duckdb_text import sql_text

if TYPE_CHECKING:
    import duckdb

TEXT, JSON = "text", "json"
"""The forms of fields of CSV files and, with quotes around texts, of values in JSON."""

_FEW = 64  # columns that one query surveys
_BATCH_VALUES = 1 << 22
_SPACE = "E' \\t\\n\\r\\x0b\\x0c'"
_LARGE = Seen.WHOLE | Seen.LARGE


@dataclass(frozen=True)
class Probe:
    """A column to survey.

    Attributes:
      source: Its name in the table.
      role: Its role.
      column: Its description in the spec.
      value: Its value in SQL; for a list in CSV, the whole field.
      form: Its type: `TEXT`, `JSON`, or a type of Arrow.
    """

    source: str
    role: Role
    column: ColumnSpec
    value: str
    form: pa.DataType | str

    @property
    def known(self) -> Findings | None:
        """The kinds of values that aren't null, if the type alone decides; None if values must be read."""
        return None if isinstance(self.form, str) else _known(self.form, self.role)

    @property
    def elements(self) -> Probe | None:
        """The elements of its lists, with a list in SQL as the value; None: it has none."""
        if self.form == TEXT and self.column.is_list:
            return replace(self, value=f"string_split({self.value}, {sql_text(self.column.separator)})")
        if self.form == JSON:
            listed = f"{self.value} >= '[' AND {self.value} < '\\'"
            return replace(self, value=f"CASE WHEN {listed} THEN {self.value}::JSON::JSON[]::VARCHAR[] END")
        if not isinstance(self.form, str) and is_list(self.form):
            return replace(self, form=self.form.value_type)
        return None


def _known(kind: pa.DataType, role: Role) -> Findings | None:
    types = pa.types
    if types.is_null(kind):
        return Findings()
    if types.is_boolean(kind):
        return Findings(Seen.BOOL)
    if types.is_integer(kind) and role != "time":
        return Findings(Seen.WHOLE if kind.bit_width <= 16 else _LARGE)
    if types.is_timestamp(kind) or types.is_date(kind):
        return Findings(Seen.DATE)
    if types.is_dictionary(kind):
        return _known(kind.value_type, role)
    if is_text(kind):
        return None if role in ("time", "label") else Findings(quoted=Seen.TEXT)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return None
    if is_list(kind):
        elements = _known(kind.value_type, "feature")
        return elements and Findings(Seen.LIST, elements=elements)
    return Findings(Seen.OTHER)


def survey(cursor: duckdb.DuckDBPyConnection, table: str, probes: Sequence[Probe]) -> dict[str, Findings]:
    """Survey the values of columns.

    Args:
      cursor: DuckDB.
      table: The table in SQL.
      probes: Its columns to survey.

    Returns:
      Column -> the kinds of its values.
    """
    found = {probe.source: probe.known or Findings() for probe in probes}
    single = [probe for probe in probes if probe.known is None and not _by_elements(probe)]
    if len(single) > _FEW:
        selected = ", ".join(f"{probe.value} AS c{number}" for number, probe in enumerate(single))
        rows = max(_BATCH_VALUES // len(single), 1)
        batches = cursor.sql(f"SELECT {selected} FROM {table}").to_arrow_reader(rows)
        found |= survey_batches(batches, single)
        single = [probe for probe in single if probe.role == "time"]
    if single:
        asked = [term for probe in single for term in (_bits(probe), _times(probe)) if term]
        row = iter(cursor.execute(f"SELECT {', '.join(asked)} FROM {table}").fetchall()[0])
        for probe in single:
            found[probe.source] = Findings.of_bits(
                next(row) or 0, next(row) if probe.role == "time" else None
            )
    for probe in probes:
        lists = _by_elements(probe) or Seen.LIST in found[probe.source].plain
        if probe.known is None and lists and (elements := probe.elements):
            inner = f"SELECT unnest({elements.value}) AS x FROM {table}"
            query = f"SELECT {_bits(replace(elements, value='x'))} FROM ({inner})"
            each = Findings.of_bits(cursor.execute(query).fetchall()[0][0] or 0)
            whole = found[probe.source]
            found[probe.source] = replace(whole, plain=whole.plain | Seen.LIST, elements=each)
    return found


def _by_elements(probe: Probe) -> bool:
    """Return whether a column has lists and nothing else."""
    return probe.form != JSON and probe.elements is not None


def survey_batches(batches: Iterable[pa.RecordBatch], probes: Sequence[Probe]) -> dict[str, Findings]:
    """Survey the values of columns, without their elements and their times.

    Args:
      batches: Values, with a column for each of `probes`, in this order.
      probes: The columns.

    Returns:
      Column -> the kinds of its values.
    """
    import duckdb

    bits = np.zeros(len(probes), np.int64)
    forms: dict[Any, list[int]] = {}
    for number, probe in enumerate(probes):
        forms.setdefault(probe.form, []).append(number)
    with duckdb.connect(":memory:") as connection:
        for batch in batches:
            for form, numbers in forms.items():
                columns = [batch.column(number) for number in numbers]
                long = {"x": pa.concat_arrays(columns), "c": np.repeat(numbers, batch.num_rows)}
                connection.register("long", pa.table(long))
                query = f"SELECT c, bit_or({class_of(form, 'x')}) FROM long GROUP BY c"
                for number, seen in connection.execute(query).fetchall():
                    bits[number] |= seen
                connection.unregister("long")
    return {probe.source: Findings.of_bits(int(seen)) for probe, seen in zip(probes, bits, strict=True)}


def find(
    cursor: duckdb.DuckDBPyConnection, table: str, probe: Probe, example: Example
) -> tuple[int, str] | None:
    """Find the first value of some kinds: return its record's number in the table, from 0, and its text."""
    single = [] if probe.known is None and _by_elements(probe) else [(probe, f"{probe.value} AS x")]
    elements = None if example.whole else probe.elements
    inner = [(elements, f"unnest({elements.value}) AS x")] if elements else []
    found = (_find(cursor, table, one, values, example) for one, values in (*single, *inner))
    return next(filter(None, found), None)


def _find(
    cursor: duckdb.DuckDBPyConnection, table: str, probe: Probe, values: str, example: Example
) -> tuple[int, str] | None:
    probe = replace(probe, value="x")
    if example.region is None:
        kinds = int(example.kinds) << QUOTED | (0 if example.quoted else int(example.kinds))
        wanted = f"({class_of(probe.form, 'x')}) & {kinds} <> 0"
    else:
        wanted = _inside(probe, example.region)
    numbered = f"SELECT row_number() OVER () - 1 AS n, {values} FROM {table}"
    rows = cursor.execute(f"SELECT n, x::VARCHAR FROM ({numbered}) WHERE {wanted} LIMIT 1").fetchall()
    return (int(rows[0][0]), str(rows[0][1])) if rows else None


def _bits(probe: Probe) -> str:
    kinds = class_of(probe.form, probe.value)
    return f"bit_or(CASE WHEN {_in_bounds(probe)} THEN {kinds} ELSE {int(Seen.MISSING)} END)"


def _times(probe: Probe) -> str:
    if probe.role != "time":
        return ""
    counts = (f"count(*) FILTER (WHERE {_inside(probe, region)})" for region in range(len(TIME_EDGES) - 1))
    return f"[{', '.join(counts)}]"


def _inside(probe: Probe, region: int) -> str:
    number, low, high = _number(probe), TIME_EDGES[region], TIME_EDGES[region + 1]
    return f"({number} >= {low:.0f} AND {number} < {high:.0f} AND {_in_bounds(probe)})"


def _in_bounds(probe: Probe) -> str:
    """Return whether a time is within its bounds, in SQL; a value outside is bad, and so has no unit."""
    if probe.role != "time" or (probe.column.min is None and probe.column.max is None):
        return "TRUE"
    low, high = probe.column.min, probe.column.max
    return f"coalesce({_number(probe)} BETWEEN {low or '-inf'!r}::DOUBLE AND {high or 'inf'!r}::DOUBLE, TRUE)"


def _number(probe: Probe) -> str:
    if probe.form == JSON:
        return f"TRY_CAST(trim({probe.value}, '\"') AS DOUBLE)"
    return f"TRY_CAST({probe.value} AS DOUBLE)"


def class_of(form: pa.DataType | str, x: str) -> str:
    """Return the class of a value of a form, in SQL."""
    if form == TEXT:
        return text_class(x)
    if form == JSON:
        return _json_class(x)
    assert not isinstance(form, str)
    if pa.types.is_dictionary(form):
        form = form.value_type
    known = _known(form, "feature")
    if known is not None and not is_text(form):
        kinds = int(known.plain) | int(known.quoted) << QUOTED
        return f"CASE WHEN {x} IS NULL THEN {int(Seen.MISSING)} ELSE {kinds} END"
    if is_text(form):
        return f"(({text_class(f'{x}::VARCHAR')}) << {QUOTED})"
    if pa.types.is_floating(form):
        number = f"{x}::DOUBLE"
        small = f"abs({number}) < {EXACT[pa.float32()]:.0f} AND {number} = floor({number})"
        kind = f"CASE WHEN {small} THEN {int(Seen.FLOAT)} ELSE {_number_class(number, EXACT[form])} END"
        kind = f"({kind}) | {int(Seen.POINT)}"
        return f"CASE WHEN {x} IS NULL OR isnan({x}) THEN {int(Seen.MISSING)} ELSE {kind} END"
    whole, big = int(_LARGE), int(Seen.BIG | Seen.LARGE)
    fits = f"CASE WHEN TRY_CAST({x} AS BIGINT) IS NULL THEN {big} ELSE {whole} END"
    if pa.types.is_decimal(form):
        fits = f"CASE WHEN {x} <> floor({x}) THEN {int(Seen.FRACTION | Seen.POINT)} ELSE {fits} END"
    return f"CASE WHEN {x} IS NULL THEN {int(Seen.MISSING)} ELSE {fits} END"


def text_class(x: str) -> str:
    """Return the class of a text in SQL. The first forms are frequent, and cheap to recognise."""
    trimmed = f"trim({x}, {_SPACE})"
    words = "|".join(map(re.escape, sorted(MISSING)))
    number = _number_class(f"TRY_CAST({trimmed} AS DOUBLE)", EXACT[pa.float64()])
    whole = (
        f"CASE WHEN TRY_CAST({trimmed} AS BIGINT) IS NULL THEN {int(Seen.BIG | Seen.LARGE)} "
        f"WHEN strlen({trimmed}) < 8 THEN {int(Seen.WHOLE)} ELSE {int(_LARGE)} END"
    )
    point = f"CASE WHEN contains({x}, '.') THEN {int(Seen.POINT)} ELSE 0 END"
    letters = f"{words}|true|false|inf|infinity"
    cases: list[tuple[str, str | Seen]] = [
        (f"{x} IS NULL", Seen.MISSING),
        (f"{x} >= 'A' AND (strlen({x}) > 8 OR NOT {_has(x, f'(?i){letters}')})", Seen.TEXT),
        (_has(x, "-?(?:0|[1-9][0-9]{0,6}|1[0-5][0-9]{6})"), Seen.WHOLE),
        (_has(x, "-?[1-9][0-9]{7,17}"), _LARGE),
        (_has(x, r"-?(?:0|[1-9][0-9]{0,12})\.[0-9]{0,8}[1-9]"), Seen.FRACTION | Seen.POINT),
        (
            _has(x, r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?)?"),
            Seen.DATE,
        ),
        (_has(trimmed, f"(?i){words}"), Seen.MISSING),
        (_has(trimmed, "[+-]?(?:0|[1-9][0-9]*)"), whole),
        (_has(trimmed, "[+-]?0[0-9]+"), Seen.PADDED),
        (_has(trimmed, NUMBER), f"{number} | {point}"),
        (_has(trimmed, INFINITE), Seen.FRACTION),
        (_has(trimmed, "(?i)true|false"), Seen.BOOL),
        (_has(trimmed, DATE), Seen.DATE),
    ]
    whens = " ".join(
        f"WHEN {test} THEN {kind if isinstance(kind, str) else int(kind)}" for test, kind in cases
    )
    return f"(CASE {whens} ELSE {int(Seen.TEXT)} END)"


def _json_class(x: str) -> str:
    inside = f"substr({x}, 2, length({x}) - 2)"
    return (
        f"CASE WHEN {x} IS NULL OR {x} = 'null' THEN {int(Seen.MISSING)} "
        f"WHEN {x} >= '\"' AND {x} < '#' THEN {text_class(inside)} << {QUOTED} "
        f"WHEN {x} >= '[' AND {x} < '\\' THEN {int(Seen.LIST)} "
        f"WHEN {x} >= '{{' THEN {int(Seen.OTHER)} ELSE {text_class(x)} END"
    )


def _number_class(number: str, exact: float) -> str:
    """Return the class of a number that isn't null, with a point or an exponent, in SQL."""
    whole = f"CASE WHEN abs({number}) < {exact:.0f} THEN {int(Seen.ROUND)} ELSE {int(Seen.INEXACT)} END"
    fraction = f"isinf({number}) OR {number} <> floor({number})"
    return f"CASE WHEN {fraction} THEN {int(Seen.FRACTION)} ELSE {whole} END"


def _has(text: str, form: str) -> str:
    return f"regexp_full_match({text}, {sql_text(form)})"
