"""Rows as lines of text whose byte order is the rows' order, for transport between Hadoop Streaming jobs.

::

    000012.800000000000002a.800000005f3b9c10 <tab> 42 <tab> 17 <tab> 3,8,11 <tab> 0.5 ...
    number . hexadecimal numbers             <tab> the columns, lists with commas

The key is the text before the first tab. Its first field is the number of a range or of a shard, and
partitions the rows. The other fields have a fixed width and a flipped sign bit, so that their bytes
(``LC_ALL=C``, Hadoop's ``Text``) compare as the numbers do. A float32 is written with enough digits to
restore it exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from gmeta.core.schema import Column
from gmeta.preprocess.source import Columns, Ints, Reason, Values, from_arrow
from gmeta.preprocess.table_spec import TableSpec

TALLY = "!"
"""The key of lines that carry a `Tally`; it sorts before all others."""

_HEX = np.array([list(f"{byte:02x}".encode()) for byte in range(256)], np.uint8)
_DIGITS = 6
_BLOCK = 8 << 20
_TYPES = {"int64": pa.int64(), "float32": pa.float32()}


def keys(number: Ints, sort: Sequence[Ints]) -> pa.Array:
    """Build the keys (N,) of rows.

    Args:
      number: (N,) range or shard, from 0 to 999,999.
      sort: Arrays of (N,) integers, by which the rows of each range or shard are sorted.
    """
    count = len(number)
    digits = (number[:, None] // 10 ** np.arange(_DIGITS - 1, -1, -1)) % 10 + ord("0")
    fields = [digits.astype(np.uint8)]
    for values in sort:
        flipped = values.astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)
        fields += [np.full((count, 1), ord("."), np.uint8)]
        fields += [_HEX[flipped.astype(">u8").view(np.uint8).reshape(count, 8)].reshape(count, 16)]
    text = np.concatenate(fields, axis=1)
    return pa.array(np.ascontiguousarray(text).view(f"S{text.shape[1]}").reshape(count)).cast(pa.string())


def write_rows(out: IO[bytes], key: pa.Array, rows: Columns, columns: Sequence[Column]) -> None:
    """Write rows as lines.

    Args:
      out: The file to write to.
      key: (N,) text, without tabs.
      rows: N rows.
      columns: The columns to write, in order.
    """
    if not len(key):
        return
    fields = [key]
    for column in columns:
        values = rows[column.name]
        if isinstance(values, tuple):
            flat, splits = values
            text = pa.ListArray.from_arrays(pa.array(splits, pa.int32()), pa.array(flat).cast(pa.string()))
            fields.append(pc.binary_join(text, ","))
        else:
            fields.append(pa.array(values).cast(pa.string()))
    lines = pc.binary_join_element_wise(*fields, "\t")
    whole = pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines)
    out.write(pc.binary_join(whole, "\n")[0].as_buffer())
    out.write(b"\n")


def read_rows(lines: bytes, columns: Sequence[Column]) -> tuple[Ints, dict[str, Values]]:
    """Parse lines that `write_rows` wrote: return the number of each line's key, and the rows."""
    names = ["", *(column.name for column in columns)]
    types = {c.name: pa.string() if c.is_list else _TYPES[c.dtype] for c in columns}
    table = csv.read_csv(
        pa.BufferReader(lines),
        csv.ReadOptions(column_names=names, use_threads=False, block_size=len(lines) + 1),
        csv.ParseOptions(delimiter="\t", quote_char=False),
        csv.ConvertOptions(column_types={"": pa.string(), **types}, null_values=[]),
    )
    number = pc.utf8_slice_codeunits(table.column(0), 0, _DIGITS).cast(pa.int64()).to_numpy()
    rows = from_arrow(table.drop_columns([""]).select([c.name for c in columns if not c.is_list]))
    for column in columns:
        if column.is_list:
            rows[column.name] = _lists(table[column.name].combine_chunks(), column)
    return number, {column.name: rows[column.name] for column in columns}


def _lists(text: pa.Array, column: Column) -> tuple[NDArray[np.generic], Ints]:
    parts = pc.split_pattern(pc.if_else(pc.equal(text, ""), None, text), ",")
    lengths = pc.fill_null(pc.list_value_length(parts), 0).to_numpy(zero_copy_only=False)
    flat = parts.flatten().cast(_TYPES[column.dtype]).to_numpy(zero_copy_only=False)
    return flat, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def blocks(stream: IO[bytes], size: int = _BLOCK) -> Iterator[bytes]:
    """Yield whole lines of a stream, about ``size`` bytes at a time."""
    rest: list[bytes] = []
    while block := stream.read(size):
        end = block.rfind(b"\n") + 1
        if not end:
            rest.append(block)
            continue
        yield b"".join([*rest, block[:end]])
        rest = [block[end:]] if end < len(block) else []
    if rest:
        yield b"".join(rest)


def without_tallies(block: bytes) -> tuple[list[str], bytes]:
    """Split sorted lines into the tallies at the beginning and the other lines."""
    found, mark = [], f"{TALLY}\t".encode()
    while block.startswith(mark):
        line, _, block = block.partition(b"\n")
        found.append(line[len(mark) :].decode())
    return found, block


def write_tally(out: IO[bytes], tally: str) -> None:
    """Write a tally as a line."""
    out.write(f"{TALLY}\t{tally}\n".encode())


# Parsing of lines of text to records, for pieces of files: from a pipe, or from a split on a cluster.
#
# Values stay text; `normalise` converts them to numbers. Unlike a reader of whole files, this one can't know
# a line's number, and can't join a field that spans several lines. It drops the line that names the columns,
# wherever it occurs.

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
      null: Texts that stand for null, in addition to the empty one.
    """

    format: str
    names: tuple[str, ...] = ()
    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    null: tuple[str, ...] = ()


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
      A pair: records with the wanted columns that the lines have, as text or lists of text; and the lines
      that aren't records. Blank lines are ignored. If a line can't be decoded, several pairs are yielded.
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
        csv.ParseOptions(
            delimiter=form.delimiter, quote_char=form.quote or False, invalid_row_handler=refuse
        ),
        csv.ConvertOptions(
            include_columns=wanted,
            column_types={name: pa.string() for name in form.names},
            null_values=["", *form.null],
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
