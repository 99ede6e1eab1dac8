"""Decides the settings that a spec leaves open, from all values of a table that only Spark can read.

Each worker surveys its part of the table as `gmeta.preprocess.tables.type_survey` surveys a file, and the
driver merges the results. So the types are those that `gmeta.preprocess.prepare` decides for the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gmeta.preprocess.cluster.row_text import parse_lines
from gmeta.preprocess.cluster.spark_rows import FILE, Batches, by_file, join_lines
from gmeta.preprocess.cluster.table_input import InputFile, TableInput
from gmeta.preprocess.plan.column_types import Example, Findings, Seen
from gmeta.preprocess.table_spec import RESERVED, ColumnSpec, Role, TableSpec
from gmeta.preprocess.tables.duckdb_text import sql_name, sql_text
from gmeta.preprocess.tables.table_survey import (
    REWRITTEN,
    Names,
    Wanted,
    decide_spec,
    is_rewritten,
    merge_names,
    open_columns,
    rewritten,
)
from gmeta.preprocess.tables.type_survey import JSON, TEXT, Probe, find, survey

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import DataFrame

FOUND = "found string"
"""The column that workers yield, in Spark's notation."""

_BATCH_BYTES = 32 << 20  # of lines that are surveyed together
_BATCH_ROWS = 1 << 19


@dataclass
class Survey:
    """The survey of the columns of a table, or of a part of it.

    Attributes:
      headers: The different lists of columns that records have.
      found: Column -> the kinds of its values.
      examples: Column -> kind of value or region of times -> a value.
    """

    headers: set[tuple[str, ...]] = field(default_factory=set)
    found: dict[str, Findings] = field(default_factory=dict)
    examples: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, source: str, own: Findings) -> None:
        """Add the survey of a part of a column."""
        self.found[source] = self.found[source].merge(own) if source in self.found else own

    def merge(self, other: Survey) -> None:
        """Add the survey of another worker."""
        self.headers |= other.headers
        for source, own in other.found.items():
            self.add(source, own)
        for source, examples in other.examples.items():
            self.examples[source] = {**examples, **self.examples.get(source, {})}

    def show(self, source: str, role: Role, column: ColumnSpec, example: Example) -> str | None:
        """Return a value of some kinds."""
        there = self.examples.get(source, {})
        if example.region is not None:
            return there.get(f"region {example.region}")
        return next(
            (text for kind, text in there.items() if kind.isdigit() and int(kind) & example.kinds), None
        )

    def to_json(self) -> str:
        """Encode the survey as JSON."""
        found = {source: _to_list(own) for source, own in self.found.items()}
        return json.dumps([sorted(self.headers), found, self.examples])

    @classmethod
    def from_json(cls, text: str) -> Survey:
        """Decode what `to_json` encoded."""
        headers, found, examples = json.loads(text)
        return cls(
            {tuple(header) for header in headers}, {s: _of_list(own) for s, own in found.items()}, examples
        )


def _to_list(found: Findings) -> list[Any]:
    elements = found.elements and _to_list(found.elements)
    return [int(found.plain), int(found.quoted), found.times, elements]


def _of_list(value: Sequence[Any]) -> Findings:
    plain, quoted, times, elements = value
    return Findings(Seen(plain), Seen(quoted), tuple(times), elements and _of_list(elements))


def resolve_on_spark(table: DataFrame, spec: TableSpec, files: Sequence[InputFile]) -> TableSpec:
    """Decide everything that a spec leaves open, from all values of a table.

    Args:
      table: Lines of text and their files; or columns.
      spec: The description of the columns.
      files: The table's files.

    Raises:
      ConfigError: The spec doesn't fit, or values don't decide the type of a column.
    """
    form = files[0].form
    known: dict[str, pa.DataType] = {}
    if form is None:
        from pyspark.sql.pandas.types import to_arrow_schema

        known = {column.name: column.type for column in to_arrow_schema(table.schema) if column.name != FILE}
        names = merge_names([list(known)])
        sources = list(dict.fromkeys(one.source for one in open_columns(spec, names) if one.source in known))
        quoted = ["`" + source.replace("`", "``") + "`" for source in sources]
        whole = Survey()
        if quoted:
            whole = _gather(table.select(*quoted).mapInArrow(partial(survey_columns, spec, names), FOUND))
    else:
        whole = _gather(
            table.mapInArrow(partial(survey_lines, TableInput("", spec, "skip", tuple(files))), FOUND)
        )
        whole.headers |= {tuple(file.form.names) for file in files if file.form and file.form.format == "csv"}
        names = merge_names(whole.headers)
        known = dict.fromkeys(names.all, pa.string())
    is_json = form is not None and form.format == "json"
    wanted = open_columns(spec, names, lists=is_json)
    for one in wanted if is_json else ():
        if one.source in whole.found and is_rewritten(one.column, whole.found[one.source]):
            shown = whole.show(one.source, one.role, one.column, REWRITTEN)
            raise rewritten(one.source, shown)
    return decide_spec(spec, names, known, wanted, whole.found, whole.show)


def _gather(parts: DataFrame) -> Survey:
    whole = Survey()
    for row in parts.collect():
        whole.merge(Survey.from_json(row["found"]))
    return whole


def survey_columns(spec: TableSpec, names: Names, batches: Batches) -> Batches:
    """Survey the columns of a partition."""
    wanted, whole = open_columns(spec, names), Survey()
    with _connection() as cursor:
        for records in _joined(batches):
            own = [one for one in wanted if one.source in records.schema.names]
            _survey(
                cursor, records, [_probe(one, records.schema.field(one.source).type) for one in own], whole
            )
    yield _cell(whole)


def survey_lines(job: TableInput, batches: Batches) -> Batches:
    """Survey the lines of a partition."""
    held: dict[int, list[bytes]] = {}
    whole = Survey()
    with _connection() as cursor:
        for batch in batches:
            for file, lines in by_file(job, batch):
                parts = held.setdefault(file, [])
                parts.append(join_lines(lines) + b"\n")
                if sum(map(len, parts)) > _BATCH_BYTES:
                    _survey_text(cursor, b"".join(held.pop(file)), job, file, whole)
        for file, parts in held.items():
            _survey_text(cursor, b"".join(parts), job, file, whole)
    yield _cell(whole)


def _survey_text(
    cursor: duckdb.DuckDBPyConnection, lines: bytes, job: TableInput, file: int, whole: Survey
) -> None:
    form = job.files[file].form
    assert form is not None
    if form.format == "json":
        _survey_json(cursor, lines, job.spec, whole)
        return
    wanted = {one.source: one for one in open_columns(job.spec, merge_names([form.names]))}
    columns = {source: ColumnSpec() for source in wanted if source in form.names}
    if not columns:
        return
    reading = TableSpec(next(iter(columns)), columns=columns, batch=f"{RESERVED}batch")
    for records, _ in parse_lines(lines, form, reading):
        if records.num_rows:
            _survey(cursor, records, [_probe(wanted[name], TEXT) for name in records.schema.names], whole)


def _survey_json(cursor: duckdb.DuckDBPyConnection, lines: bytes, spec: TableSpec, whole: Survey) -> None:
    cursor.register("batch", pa.table({"line": lines.decode(errors="replace").split("\n")}))
    table = "(SELECT CASE WHEN json_valid(line) THEN line::JSON END AS line FROM batch)"
    keys = [
        tuple(row[0])
        for row in cursor.execute(f"SELECT DISTINCT json_keys(line) FROM {table}").fetchall()
        if row[0]
    ]
    whole.headers |= set(keys)
    probes = []
    for one in open_columns(spec, merge_names(keys), lists=True):
        pointer = "/" + one.source.replace("~", "~0").replace("/", "~1")
        value = f"json_extract(line, {sql_text(pointer)})::VARCHAR"
        probes.append(Probe(one.source, one.role, one.column, value, JSON))
    _survey_table(cursor, table, probes, whole)
    cursor.unregister("batch")


def _probe(one: Wanted, form: pa.DataType | str) -> Probe:
    return Probe(one.source, one.role, one.column, sql_name(one.source), form)


def _survey(
    cursor: duckdb.DuckDBPyConnection,
    records: pa.RecordBatch | pa.Table,
    probes: Sequence[Probe],
    whole: Survey,
) -> None:
    full = [probe for probe in probes if records.column(probe.source).null_count < records.num_rows]
    cursor.register("batch", pa.table(records.columns, names=records.schema.names))
    _survey_table(cursor, "batch", full, whole)
    cursor.unregister("batch")


def _survey_table(
    cursor: duckdb.DuckDBPyConnection, table: str, probes: Sequence[Probe], whole: Survey
) -> None:
    """Survey a part of the table, and keep an example of each kind of value that is new."""
    for source, own in survey(cursor, table, probes).items():
        whole.add(source, own)
        probe = next(probe for probe in probes if probe.source == source)
        examples = whole.examples.setdefault(source, {})
        inner = own.elements or own
        new = {str(int(kind)): Example("", kind) for kind in Seen if kind in inner.kinds}
        new |= {f"region {n}": Example("", Seen(0), n) for n, count in enumerate(own.times) if count}
        for name, example in new.items():
            if name not in examples and (value := find(cursor, table, probe, example)) is not None:
                examples[name] = repr(value[1][:60])


def _joined(batches: Batches) -> Iterator[pa.Table]:
    """Join batches to larger ones, each large enough to be worth planning a query for it."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(one.num_rows for one in held) >= _BATCH_ROWS:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


@contextmanager
def _connection() -> Iterator[duckdb.DuckDBPyConnection]:
    import duckdb

    with duckdb.connect(":memory:", config={"threads": 1}) as connection:
        yield connection


def _cell(whole: Survey) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"found": [whole.to_json()]})
