"""Parsing of lines of text to records, for pieces of files: from a pipe, or from a split on a cluster.

Values stay text; `normalise` converts them to numbers. Unlike a reader of whole files, this one can't know a
line's number, and can't join a field that spans several lines. It drops the line that names the columns
wherever it comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from gmeta.preprocess.bad_records import Reason
from gmeta.preprocess.table_spec import TableSpec

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextForm:
    """The format of a file's lines.

    Attributes:
      format: ``"csv"`` or ``"json"``.
      names: The columns of a CSV file, in the file's order.
      delimiter: The character between fields.
      quote: The character that encloses a field with a delimiter.
      header: Whether a line of the file names the columns.
    """

    format: str
    names: tuple[str, ...] = ()
    delimiter: str = ","
    quote: str = '"'
    header: bool = True


class Refused(NamedTuple):
    """A line that isn't a record."""

    reason: Reason
    message: str


def parse_lines(
    lines: bytes, form: TextForm, spec: TableSpec
) -> Iterator[tuple[pa.RecordBatch, list[Refused]]]:
    """Parse whole lines to records.

    Args:
      lines: Any number of lines.
      form: The lines' format.
      spec: Names the wanted columns.

    Yields:
      A pair: records with those of the wanted columns that the lines have, as text or lists of text; and the
      lines that aren't records. Blank lines are ignored. If a line can't be decoded, there are several pairs.
    """
    lines = lines.removeprefix(_BOM)
    try:
        yield _csv(lines, form, spec) if form.format == "csv" else _json(lines.splitlines(), spec)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        halves = lines.splitlines(keepends=True)
        if len(halves) < 2:
            yield pa.RecordBatch.from_pydict({}), [Refused(Reason.MALFORMED, _show(str(error), lines))]
            return
        for half in (halves[: len(halves) // 2], halves[len(halves) // 2 :]):
            yield from parse_lines(b"".join(half), form, spec)


def _csv(lines: bytes, form: TextForm, spec: TableSpec) -> tuple[pa.RecordBatch, list[Refused]]:
    wanted = [name for name in dict.fromkeys(spec.sources.values()) if name in form.names]
    refused: list[Refused] = []

    def refuse(row: Any) -> str:
        reason = Reason.MISSING_FIELD if row.actual_columns < row.expected_columns else Reason.EXTRA_FIELD
        expected = f"{row.expected_columns} fields expected, got {row.actual_columns}"
        refused.append(Refused(reason, f"{expected}: {row.text[:60]!r}"))
        return "skip"

    if not lines.strip():
        return _batch({name: [] for name in wanted}), []
    table = csv.read_csv(
        pa.BufferReader(lines),
        csv.ReadOptions(column_names=form.names, use_threads=False, block_size=len(lines) + 1),
        csv.ParseOptions(delimiter=form.delimiter, quote_char=form.quote, invalid_row_handler=refuse),
        csv.ConvertOptions(
            include_columns=wanted,
            column_types={name: pa.string() for name in form.names},
            null_values=[""],
            strings_can_be_null=True,
        ),
    ).combine_chunks()
    if form.header and wanted and table.num_rows:
        named = np.ones(table.num_rows, np.bool_)
        for name in wanted:
            if named.any():
                same = pc.equal(pc.utf8_trim_whitespace(table[name]), name)
                named &= pc.fill_null(same, False).to_numpy()
        if named.any():
            table = table.filter(pa.array(~named)).combine_chunks()
    batches = table.to_batches()
    return (batches[0] if batches else _batch({name: [] for name in wanted})), refused


def _json(lines: Iterable[bytes], spec: TableSpec) -> tuple[pa.RecordBatch, list[Refused]]:
    lists = {source: bool(spec.columns[name].is_list) for name, source in spec.sources.items()}
    found: dict[str, list[Any]] = {name: [] for name in lists}
    refused = []
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)
            values = _texts(record, lists) if isinstance(record, dict) else None
        except (ValueError, RecursionError):
            values = None
        if values is None:
            expected = "not a JSON object with any of the columns"
            refused.append(Refused(Reason.MALFORMED, _show(expected, line)))
            continue
        for name, value in values.items():
            found[name].append(value)
    return _batch(found, lists), refused


def _texts(record: Mapping[str, Any], lists: Mapping[str, bool]) -> dict[str, Any] | None:
    """Return the wanted values as text, ``[None]`` where a list was expected; None if all are missing."""
    values: dict[str, Any] = {}
    for name, is_list in lists.items():
        value = record.get(name)
        if is_list and value is not None:
            values[name] = [_text(element) for element in value] if isinstance(value, list) else [None]
        else:
            values[name] = _text(value)
    return values if any(value is not None for value in values.values()) else None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _batch(columns: Mapping[str, Sequence[Any]], lists: Mapping[str, bool] | None = None) -> pa.RecordBatch:
    types = {name: pa.list_(pa.string()) if lists and lists[name] else pa.string() for name in columns}
    arrays = [pa.array(values, types[name]) for name, values in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _show(message: str, line: bytes) -> str:
    return f"{message.splitlines()[0]}: {line.rstrip()[:60].decode(errors='backslashreplace')!r}"
