"""The interface of an engine's input: records as rows in columns, and the place that each came from.

The plan's functions take and return rows as columns (`Columns`), which convert from and to Arrow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gmeta.core.errors import DataError
from gmeta.core.schema import Column, OnBad
from gmeta.preprocess.config import PlanConfig, Progress
from gmeta.preprocess.table_spec import TableSpec

Ints = NDArray[np.int64]
Ragged = tuple[NDArray[Any], Ints]
"""A column of lists, values (V,) and splits (N + 1,): row ``i`` is ``values[splits[i]:splits[i + 1]]``."""
Values: TypeAlias = "NDArray[Any] | Ragged"
Columns: TypeAlias = Mapping[str, Values]
"""Column name -> (N,) int64 or float32, or values and row splits for a list column."""

_ARROW = {"int64": pa.int64(), "float32": pa.float32()}


def gather_ragged(column: Ragged, rows: Ints) -> Ragged:
    """Gather rows of a column of lists.

    Args:
      column: Values (V,) and row splits (N + 1,).
      rows: (M,) int64, the rows in the wanted order; rows may repeat.

    Returns:
      Values and row splits (M + 1,) of these rows.

    Example:
      >>> gather_ragged((np.array([7, 8, 9]), np.array([0, 2, 3])), np.array([1, 0]))
      (array([9, 7, 8]), array([0, 1, 3]))
    """
    values, splits = column
    lengths = np.diff(splits)[rows]
    new_splits = np.concatenate(([0], np.cumsum(lengths)))
    shift = np.repeat(splits[rows] - new_splits[:-1], lengths)  # from a place in the result to one in values
    return values[shift + np.arange(new_splits[-1])], new_splits


def row_count(columns: Columns) -> int:
    """Return the number of rows of some columns."""
    first = next(iter(columns.values()))
    return len(first[1]) - 1 if isinstance(first, tuple) else len(first)


def single(columns: Columns, name: str) -> NDArray[Any]:
    """Return a column with one value per row."""
    values = columns[name]
    if isinstance(values, tuple):
        raise TypeError(f"column {name!r} holds lists")
    return values


def take(columns: Columns, rows: Ints) -> dict[str, Values]:
    """Gather rows of all columns, in the order of ``rows`` (M,)."""
    return {
        name: gather_ragged(values, rows) if isinstance(values, tuple) else values[rows]
        for name, values in columns.items()
    }


def part(columns: Columns, start: int, stop: int) -> dict[str, Values]:
    """Return rows ``start`` to ``stop - 1`` of all columns, as views except for row splits."""
    found: dict[str, Values] = {}
    for name, values in columns.items():
        if isinstance(values, tuple):
            flat, splits = values
            inside = splits[start : stop + 1]
            found[name] = flat[inside[0] : inside[-1]], inside - inside[0]
        else:
            found[name] = values[start:stop]
    return found


def join_rows(parts: Sequence[Columns]) -> dict[str, Values]:
    """Concatenate the rows of several parts, at least one."""
    if len(parts) == 1:
        return dict(parts[0])
    found: dict[str, Values] = {}
    for name, first in parts[0].items():
        if isinstance(first, tuple):
            lengths = np.concatenate([np.diff(each[name][1]) for each in parts])
            splits = np.concatenate(([0], np.cumsum(lengths)))
            found[name] = np.concatenate([each[name][0] for each in parts]), splits
        else:
            found[name] = np.concatenate([each[name] for each in parts])
    return found


def from_arrow(batch: pa.RecordBatch | pa.Table) -> dict[str, Values]:
    """Convert a batch of normalised rows, without nulls, to columns; copy only where Arrow requires it."""
    found: dict[str, Values] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            offsets = array.offsets.to_numpy().astype(np.int64)
            flat = array.values.slice(offsets[0], offsets[-1] - offsets[0])
            found[name] = flat.to_numpy(zero_copy_only=False), offsets - offsets[0]
        else:
            found[name] = array.to_numpy(zero_copy_only=False)
    return found


def to_arrow(columns: Columns) -> pa.Table:
    """Convert columns to an Arrow table: the inverse of `from_arrow`."""
    return pa.table(
        {
            name: pa.LargeListArray.from_arrays(pa.array(values[1]), pa.array(values[0]))
            if isinstance(values, tuple)
            else pa.array(values)
            for name, values in columns.items()
        }
    )


def arrow_type(column: Column) -> pa.DataType:
    """Return the Arrow type of a normalised column."""
    return pa.large_list(_ARROW[column.dtype]) if column.is_list else _ARROW[column.dtype]


# The handling of bad records: the first one ends the run, or each is counted.
#
# A function that parses a record knows its fault, but not its place, which the engine that calls it knows. So
# the function raises a `BadRecord` without a place, and the engine passes it with the place to a
# `BadRecords`, which applies the rule.


class Reason(Enum):
    """The ways in which a record can be bad; the values are what reports and manifests print."""

    MISSING_FIELD = "missing field"
    EXTRA_FIELD = "extra field"
    NOT_A_NUMBER = "not a number"
    OUT_OF_RANGE = "out of range"
    UNKNOWN_CODE = "unknown code"
    UNKNOWN_USER = "unknown user id"
    UNKNOWN_ITEM = "unknown item id"
    REPEATED_ID = "id given twice"
    REPEATED_KEY = "key given twice in a task"
    EMPTY_TASK = "empty task"
    NULL = "null"
    NAN = "NaN"
    WRONG_TYPE = "wrong type"
    MISSING_COLUMN = "missing column"
    MALFORMED = "malformed line"


WHOLE_NUMBER = "a whole number"
"""The expected content of an int64 column, in messages; text in such a column is most often an id."""
TIME = "a time, as a whole number or a date"
"""The expected content of an int64 column that is the time."""
_TEXT_ID = re.compile(rf"{WHOLE_NUMBER}, got (?!'-?[0-9.]+')")


class BadRecord(Exception):  # noqa: N818 - it is caught and counted, and seldom an error of the run
    """A record that breaks a rule.

    Args:
      reason: The rule that it breaks.
      message: The received and the expected value; the caller adds the place.
      of_table: Whether a spec describes its columns; the spec itself may then be wrong.
    """

    def __init__(self, reason: Reason, message: str, *, of_table: bool = False) -> None:
        super().__init__(message)
        self.reason, self.of_table = reason, of_table


@dataclass
class BadRecords:
    """The rule for bad records, and their counts.

    Attributes:
      on_bad: The rule.
      counts: (file name, reason) -> records left out.
      examples: (file name, reason) -> messages with file and line, for the first `EXAMPLES` left out.
    """

    EXAMPLES = 3

    on_bad: OnBad = "raise"
    counts: dict[tuple[str, Reason], int] = field(default_factory=dict)
    examples: dict[tuple[str, Reason], list[str]] = field(default_factory=dict)

    def add(self, error: BadRecord, path: Path, line: int | None, count: int = 1) -> None:
        """Raise ``error`` with its place, or count it.

        Args:
          error: What is wrong.
          path: The file that the record is in.
          line: Its line, counted from 1; None if the message names the place.
          count: The number of records that are bad in this way.

        Raises:
          DataError: The rule is ``"raise"``.
        """
        if self.on_bad == "raise":
            advice = "mend it, or leave such records out with --on-bad skip"
            if error.of_table and error.reason is Reason.NULL:
                advice = (
                    "give what stands for gaps with --default: a number, a text, own for a value of "
                    f"its own, or COLUMN=VALUE for one column; {advice}"
                )
            if error.of_table and error.reason is Reason.NOT_A_NUMBER and _TEXT_ID.search(str(error)):
                advice = (
                    "if it is an id, set hash = true for its column in --spec, which stores text and numbers "
                    "alike; if not, mend it"
                )
            raise DataError(f"{error.reason.value}: {error}", path=path, line=line, advice=advice) from error
        key = (path.name, error.reason)
        self.counts[key] = self.counts.get(key, 0) + count
        examples = self.examples.setdefault(key, [])
        if len(examples) < self.EXAMPLES:
            examples.append(str(DataError(str(error), path=path, line=line)))


NUMBER = "_gmeta_number"
"""A column that sources add: the record's number, by which `Source.where` finds it. It isn't stored."""
RECORD, ELEMENT = "_gmeta_of_record", "_gmeta_of_element"
"""Columns that `TableSource.chunks` adds with ``places``: where in the input a row is from."""


class Named(Protocol):
    """The part of an input that a run's summary needs.

    Attributes:
      name: The input's name in the summary and the manifest.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - above

    def holds_rows(self, file: str) -> bool:
        """Return whether a file of this name holds records, not attributes."""


class Source(Named, Protocol):
    """Rows to prepare.

    Attributes:
      path: The path that errors about the whole source name.
      spec: The columns, as `TableSpec.resolve` decided them.
      defaults: The settings that `PrepareConfig.resolve` fills in.
      rows_read: Records that `chunks` has read so far, bad ones included.
    """

    @property
    def path(self) -> Path: ...  # noqa: D102 - above

    @property
    def spec(self) -> TableSpec: ...  # noqa: D102

    @property
    def defaults(self) -> PlanConfig: ...  # noqa: D102

    @property
    def rows_read(self) -> int: ...  # noqa: D102

    def parts(self) -> Sequence[Source]:
        """Return the sources to prepare separately: one per partition, or itself without partitions."""

    def digests(self) -> Mapping[str, str]:
        """Return file name -> SHA-256, for every file that is read."""

    def start_digests(self) -> None:
        """Begin to digest the files, in parallel with other work."""

    def stamps(self) -> Mapping[str, Any]:
        """Return file name -> JSON values that change when the file does, found without reading it."""

    def count(self) -> int:
        """Return an upper bound on the number of records, bad ones included, without parsing them."""

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield parts of some ten thousand rows: the spec's columns, without the batch, and `NUMBER`."""

    def write_texts(self, folder: Path) -> Sequence[str]:
        """Write the texts of the rows that `chunks` has yielded; return notes (`TextCollector.write`)."""

    def where(self, number: int) -> tuple[Path, int | None, str]:
        """Return a record's file, its line in a text file, and words for its place if it has no line."""

    def check(self, tasks: Ints, bad: BadRecords) -> None:
        """Run the checks that require all rows; ``tasks`` (T,) are the tasks that have rows, ascending."""
