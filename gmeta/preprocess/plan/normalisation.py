"""The map of the plan: the conversion of a source's records to rows of int64 and float32.

`normalise` works on a whole batch of records, in Arrow's types. It is the same for every engine and format: a
text in a text file and a double in a Parquet file become the same number. Numbers in text are parsed as
doubles before they become float32, like the numbers of other formats.

==============  ==================================================================================
int64 from      whole numbers of any type and text (7, 7.0); floats and decimals that are whole, up
                to 2^53; booleans (0, 1; true, false in text); dates and times, as such or as ISO 8601
                text (microseconds since 1970, UTC; without a zone, they are UTC); ids of uint64 from
                2^63 on are the int64 of the same bits
float32 from    floats, whole numbers, decimals, booleans; text
hash            of text, or of whole numbers as text: `column_values.hash_text`
list            of these; a text is cut at the separator; null and "" are the empty list
==============  ==================================================================================

In a column of numbers or times, words such as ``-`` and ``NULL`` (`column_values.MISSING`) are null. A record
that doesn't fit is bad, with a reason: null, NaN, not a number, out of range (of the type, or of the
column's bounds), or a type that this table doesn't list. A ``default`` takes the place of null and NaN.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gmeta.core.shares import splitmix64
from gmeta.preprocess.plan.column_values import ColumnFault, is_text, numbers
from gmeta.preprocess.source import Columns, Ints, Ragged, Reason, Values, row_count, take
from gmeta.preprocess.table_spec import ColumnSpec, Role, TableSpec


@dataclass(frozen=True)
class Fault:
    """Records of a batch that are bad for one reason in one column.

    Attributes:
      reason: The rule that they break.
      rows: (F,) their places in the batch.
      message: What was expected.
      given: The original column, to show a bad value in messages; None if there is no such column.
    """

    reason: Reason
    rows: Ints
    message: str
    given: pa.Array | None = None

    def describe(self, row: int) -> str:
        """Describe the expected and the received value in the batch's record ``row``."""
        if self.given is None:
            return self.message
        text = repr(self.given[row].as_py())
        return f"{self.message}, got {text if len(text) <= 60 else text[:60] + '...'}"


class Normalised(NamedTuple):
    """The result of `normalise` for a batch.

    Attributes:
      columns: The good rows, in the order of the batch.
      rows: (N,) the place of each good row in the batch.
      faults: The faults of the other records; each record is in one fault, that of its first bad column.
    """

    columns: Columns
    rows: Ints
    faults: tuple[Fault, ...]


def normalise(batch: pa.RecordBatch, spec: TableSpec, *, hashed: Collection[str] = ()) -> Normalised:
    """Convert records to rows.

    Args:
      batch: Records, with the columns that the spec names as sources; others are ignored.
      spec: A spec that `TableSpec.resolve` returned.
      hashed: Columns of the spec whose texts the engine has already hashed, as uint64.

    Returns:
      Rows, and faults. If the batch lacks a column, that is a fault of all its records, unless the column has
      a default or holds lists.
    """
    count = batch.num_rows
    bad, faults = np.zeros(count, np.bool_), list[Fault]()
    found: dict[str, Values] = {}
    places = {name: place for place, name in enumerate(batch.schema.names)}
    for name, column in spec.columns.items():
        source = column.source or name
        if spec.blocks and name == spec.task:
            found[name] = np.zeros(count, np.int64)
            continue
        if source not in places:
            if column.default is None and not (column.gaps or column.is_list or "*" in (column.values or {})):
                message = f"there is no column {source!r}"
                faults.append(Fault(Reason.MISSING_COLUMN, np.flatnonzero(~bad), message))
                return Normalised({}, np.zeros(0, np.int64), tuple(faults))
            given: pa.Array = pa.nulls(count)
        else:
            given = batch.column(places[source])
        values, broken = _column(given, column, name in hashed, spec.role_of(name))
        found[name] = values
        for reason, mask, expected in broken:
            rows = np.flatnonzero(mask & ~bad)
            if len(rows):
                faults.append(Fault(reason, rows, f"{source} must be {expected}", given))
                bad[rows] = True
    rows = np.flatnonzero(~bad)
    if len(rows) < count:
        found = take(found, rows)
    if spec.blocks:
        found[spec.task] = _blocks({name: found[name] for name in found if name != spec.task}, spec.blocks)
    return Normalised(found, rows, tuple(faults))


def _blocks(columns: Columns, blocks: int) -> Ints:
    """Compute the block (N,) of each row from its values, regardless of the order of columns and rows."""
    state = np.zeros(row_count(columns), np.uint64)
    for name in sorted(columns):
        values = columns[name]
        flat = values[0] if isinstance(values, tuple) else values
        bits = flat.astype(np.float64).view(np.uint64) if flat.dtype.kind == "f" else flat.astype(np.uint64)
        mixed = splitmix64(bits)
        if isinstance(values, tuple):
            splits = values[1]
            sums = np.concatenate(([np.uint64(0)], np.cumsum(mixed, dtype=np.uint64)))
            mixed = splitmix64(sums[splits[1:]] - sums[splits[:-1]])
        state = splitmix64(state ^ mixed)
    return (state % np.uint64(blocks)).astype(np.int64)


def _column(
    given: pa.Array, column: ColumnSpec, hashed: bool, role: Role
) -> tuple[Values, list[ColumnFault]]:
    if isinstance(given, pa.ChunkedArray):
        given = given.combine_chunks()
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    if not column.is_list:
        parsed = numbers(given, column, hashed, role)
        return parsed.values, parsed.faults
    lists = lists_of(given, column)
    if lists is None:
        wrong = np.ones(len(given), np.bool_)
        empty: Ragged = (np.zeros(0, column.dtype), np.zeros(len(given) + 1, np.int64))
        return empty, [(Reason.WRONG_TYPE, wrong, f"a list of {column.dtype}, not {given.type}")]
    flat, splits = lists
    parsed = numbers(flat, column, hashed, role)
    row = np.repeat(np.arange(len(given)), np.diff(splits))
    faults = []
    for reason, mask, expected in parsed.faults:
        rows = np.zeros(len(given), np.bool_)
        rows[row[mask]] = True
        faults.append((reason, rows, f"a list of which each is {expected}"))
    return (parsed.values, splits), faults


def lists_of(given: pa.Array, column: ColumnSpec) -> tuple[pa.Array, Ints] | None:
    """Return values and row splits of an array of lists, or of texts to split; None for any other type."""
    if pa.types.is_null(given.type):
        return pa.nulls(0, pa.int64()), np.zeros(len(given) + 1, np.int64)
    if is_text(given.type):
        given = pc.if_else(pc.equal(given, ""), pa.scalar(None, given.type), given)
        given = pc.split_pattern(given, column.separator)
    elif pa.types.is_fixed_size_list(given.type):
        given = given.cast(pa.list_(given.type.value_type))
    if not (pa.types.is_list(given.type) or pa.types.is_large_list(given.type)):
        return None
    # flatten() omits the values under null lists; the offsets alone would include them.
    lengths = pc.fill_null(pc.list_value_length(given), 0).to_numpy(zero_copy_only=False)
    return given.flatten(), np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
