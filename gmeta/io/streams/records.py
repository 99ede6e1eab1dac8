"""Rows of a log: from JSON lines, Parquet or ``tf.train.Example`` to Arrow, from there to tensors.

A log's schema maps columns to types: ``"int64"``, ``"float32"``, ``"float64"``, ``"string"``, each also with
``[]`` for a list, and ``"timestamp"``, which becomes int64 microseconds since 1970. Without a schema, the
first rows of the log determine it: whole numbers and booleans are int64, other numbers float32.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import tensorflow as tf
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError, first_line

Ints = NDArray[np.int64]
Columns = Mapping[str, str]
"""Column -> its type."""
Format = Literal["json", "example"]
"""The form of one row as bytes: a JSON object, or a serialised ``tf.train.Example``."""

SECOND = 1_000_000
"""Times are in microseconds."""
UNITS: Mapping[str, float] = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
"""Unit of a column of times -> microseconds."""

_SCALARS = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us"),
}
_TENSORS = {
    "int64": tf.int64,
    "float32": tf.float32,
    "float64": tf.float64,
    "string": tf.string,
    "timestamp": tf.int64,
}
_ADVICE = "mend the source, or skip such rows by on_bad='skip'"
_KIND_ADVICE = f"{_ADVICE}; if the column has another kind than in its first rows, name it by columns="
_YEAR = 365.2425 * 86400 * 1e6
_FARTHEST = 3e3 * _YEAR
"""In microseconds."""


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one partition.

    Attributes:
      batch: The rows.
      times: (rows,) event times in microseconds; None: the column of times has them.
      place: A function that returns the partition's place after the first k rows, as JSON values.
    """

    batch: pa.RecordBatch
    times: Ints | None
    place: Callable[[int], Any]


@dataclass
class StreamCounts:
    """What was read from a log.

    Attributes:
      rows: Rows read.
      bad: Rows skipped because they couldn't be parsed.
      messages: The first hundred reasons.
    """

    rows: int = 0
    bad: int = 0
    messages: list[str] = field(default_factory=list)

    def skip(self, reason: str) -> None:
        """Count a bad row."""
        self.bad += 1
        if len(self.messages) < 100:
            self.messages.append(reason)


def check_columns(columns: Columns) -> None:
    """Check the types of a schema.

    Raises:
      ConfigError: A type isn't one of those above, or there is no column.
    """
    if not columns:
        raise ConfigError("stream: columns is empty: name the columns, or leave it out to infer them")
    for name, kind in columns.items():
        if kind.removesuffix("[]") not in _SCALARS or kind == "timestamp[]":
            known = ", ".join([*_SCALARS, *(f"{each}[]" for each in _SCALARS if each != "timestamp")])
            raise ConfigError(f"stream: column {name!r} has the type {kind!r}; known types are {known}")


def arrow_schema(columns: Columns) -> pa.Schema:
    """Return the Arrow schema of a log's columns."""
    kinds = {name: _SCALARS[kind.removesuffix("[]")] for name, kind in columns.items()}
    return pa.schema(
        [(name, pa.list_(kind) if columns[name].endswith("[]") else kind) for name, kind in kinds.items()]
    )


def columns_of(schema: pa.Schema, where: str) -> dict[str, str]:
    """Return the columns that a log's own schema stands for.

    Raises:
      ConfigError: A column's type can't be a feature.
    """
    return {each.name: _kind(each.type, each.name, where) for each in schema}


def _kind(found: pa.DataType, name: str, where: str) -> str:
    if pa.types.is_dictionary(found):
        return _kind(found.value_type, name, where)
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        inner = _kind(found.value_type, name, where)
        if not inner.endswith("[]") and inner != "timestamp":
            return f"{inner}[]"
    elif pa.types.is_integer(found) or pa.types.is_boolean(found):
        return "int64"
    elif pa.types.is_floating(found) or pa.types.is_decimal(found):
        return "float32"
    elif pa.types.is_timestamp(found):
        return "timestamp"
    elif pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_binary(found):
        return "string"
    raise ConfigError(
        f"{where}: column {name!r} is of the type {found}, which is no feature: name the columns to read, as "
        "in columns={'user': 'int64', 'ts': 'timestamp'}"
    )


class Parser(Protocol):
    """Parses rows of one form."""

    def __call__(self, values: Sequence[bytes], columns: Columns) -> pa.RecordBatch:
        """Parse rows; an error names the first bad one by its number, as `BadRowError`."""
        ...


class BadRowError(Exception):
    """A row that can't be parsed.

    Attributes:
      number: Its place among the parsed rows.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def parse(
    values: Sequence[bytes],
    columns: Columns,
    form: Format,
    where: Callable[[int], str],
    counts: StreamCounts | None,
) -> tuple[pa.RecordBatch, Ints]:
    """Parse rows.

    Args:
      values: One row each.
      columns: The schema.
      form: Their form.
      where: A function that names the place of row i, for errors.
      counts: Counters of skipped rows; None: a bad row is an error.

    Returns:
      The sound rows, and their numbers among `values`.

    Raises:
      DataError: A row is bad, and none may be skipped.
    """
    parser = _parse_json if form == "json" else _parse_examples
    try:
        return fit(parser(values, columns), columns), np.arange(len(values))
    except (pa.ArrowException, BadRowError, tf.errors.InvalidArgumentError, ValueError, TypeError):
        pass  # one of the rows is bad; find it
    sound, numbers = list[pa.RecordBatch](), list[int]()
    for number, value in enumerate(values):
        try:
            sound.append(fit(parser([value], columns), columns))
            numbers.append(number)
        except (
            pa.ArrowException,
            BadRowError,
            tf.errors.InvalidArgumentError,
            ValueError,
            TypeError,
        ) as error:
            reason = f"{where(number)}: {first_line(error)}"
            if counts is None:
                raise DataError(f"{reason}; got {_shown(value)}", advice=_KIND_ADVICE) from error
            counts.skip(reason)
    return concat(sound, arrow_schema(columns)), np.asarray(numbers, np.int64)


def _shown(value: bytes) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def infer_columns(values: Sequence[bytes], form: Format, where: str) -> dict[str, str]:
    """Infer the schema from a log's first rows.

    Raises:
      ConfigError: The rows don't determine it.
    """
    if form == "example":
        raise ConfigError(
            f"{where}: rows of tf.train.Example don't determine the columns' types: name them, as in "
            "columns={'user': 'int64', 'price': 'float32'}"
        )
    try:
        found = pa.json.read_json(io.BytesIO(b"\n".join(values)))
    except pa.ArrowException as error:
        raise ConfigError(
            f"{where}: the first rows determine no columns: {first_line(error)}; name them, as in "
            "columns={'user': 'int64', 'ts': 'timestamp'}"
        ) from error
    return columns_of(found.schema, where)


def _parse_json(values: Sequence[bytes], columns: Columns) -> pa.RecordBatch:
    options = pa.json.ParseOptions(explicit_schema=_json_schema(columns), unexpected_field_behavior="ignore")
    whole = b"\n".join(values)
    if whole.count(b"\n") >= len(values):  # within an object, a line break is a space
        whole = b"\n".join(value.replace(b"\n", b" ") for value in values)
    table = pa.json.read_json(
        io.BytesIO(whole), pa.json.ReadOptions(block_size=len(whole) + 1), parse_options=options
    )
    if table.num_rows != len(values):  # an empty value, or several objects in one
        for number, value in enumerate(values):
            if not isinstance(json.loads(value), dict):
                raise BadRowError(number, "no JSON object")
        raise BadRowError(0, "not one JSON object")
    return table.combine_chunks().to_batches()[0]


def _json_schema(columns: Columns) -> pa.Schema:
    """The types in which Arrow's reader takes every number that a column may have."""
    wide = {"float32": pa.float64()}
    fields = []
    for name, kind in columns.items():
        scalar = kind.removesuffix("[]")
        found = wide.get(scalar, _SCALARS[scalar])
        fields.append((name, pa.list_(found) if kind.endswith("[]") else found))
    return pa.schema(fields)


def _parse_examples(values: Sequence[bytes], columns: Columns) -> pa.RecordBatch:
    spec: dict[str, Any] = {}
    for name, kind in columns.items():
        dtype = _TENSORS[kind.removesuffix("[]")]
        dtype = tf.float32 if dtype == tf.float64 else dtype  # the form has no other
        spec[name] = tf.io.RaggedFeature(dtype) if kind.endswith("[]") else tf.io.FixedLenFeature([], dtype)
    found = tf.io.parse_example(tf.constant(list(values), tf.string), spec)
    arrays = []
    for name, kind in columns.items():
        value = found[name]
        if kind.endswith("[]"):
            splits = pa.array(value.row_splits.numpy().astype(np.int32))
            arrays.append(pa.ListArray.from_arrays(splits, pa.array(value.values.numpy())))
        else:
            arrays.append(pa.array(value.numpy()))
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def fit(batch: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    """Return a batch with a schema's columns and types, and without gaps.

    A gap is NaN in a column of float32, ``""`` in one of strings, and an empty list in one of lists.

    Raises:
      ValueError: A column is missing, has another type, or a column of whole numbers or times has a gap.
    """
    arrays = []
    for wanted in arrow_schema(columns):
        place = batch.schema.get_field_index(wanted.name)
        if place < 0:
            raise ValueError(f"no column {wanted.name!r} among {', '.join(batch.schema.names)}")
        arrays.append(_fit(batch.column(place), wanted.type, wanted.name))
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _fit(array: pa.Array, wanted: pa.DataType, name: str) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_list(wanted):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        inner = _fit(array.flatten(), wanted.value_type, name)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        return pa.ListArray.from_arrays(pa.array(splits.astype(np.int32)), inner, type=wanted)
    if array.null_count:
        gap: Any = np.nan if pa.types.is_floating(wanted) else "" if pa.types.is_string(wanted) else None
        if gap is None:
            raise ValueError(
                f"column {name!r} has a gap, which {wanted} can't express: read it as float32, as NaN"
            )
        if pa.types.is_null(array.type) or pa.types.is_integer(array.type):
            array = array.cast(wanted, safe=False)
        array = pc.fill_null(array, pa.scalar(gap, array.type))
    if array.type == wanted:
        return array
    if pa.types.is_timestamp(wanted):
        if pa.types.is_timestamp(array.type):  # with a zone, or in another unit
            return array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64()).cast(wanted)
        return array.cast(wanted)
    # 0.1 isn't a float32, and a double that is rounded to one is what is wanted.
    return array.cast(wanted, safe=not pa.types.is_floating(wanted))


def concat(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return all rows of some batches as one."""
    table = pa.Table.from_batches(batches, schema).combine_chunks()
    return table.to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], schema)


def event_times(batch: pa.RecordBatch, column: str, unit: str) -> Ints:
    """Return the times of rows in microseconds.

    Raises:
      DataError: A time is no number.
      ConfigError: A time is more than three thousand years from 1970, as of another unit.
    """
    values = batch.column(batch.schema.get_field_index(column))
    if pa.types.is_timestamp(values.type):
        return values.cast(pa.int64()).to_numpy()
    numbers = values.to_numpy()
    if pa.types.is_floating(values.type) and not np.isfinite(numbers).all():
        raise DataError(
            f"column {column!r} has a time that is {numbers[~np.isfinite(numbers)][0]}", advice=_ADVICE
        )
    far = np.abs(numbers.astype(np.float64)) * UNITS[unit] > _FARTHEST
    if far.any():
        years = float(numbers[far][0]) * UNITS[unit] / _YEAR
        raise ConfigError(
            f"column {column!r} has the time {numbers[far][0]}, which is {years:.0f} years from 1970 in unit="
            f"{unit!r}: give the unit of the column, unit='ms', 'us' or 'ns'"
        )
    if pa.types.is_floating(values.type):
        return np.round(numbers.astype(np.float64) * UNITS[unit]).astype(np.int64)
    found: Ints = numbers * int(UNITS[unit]) if UNITS[unit] >= 1 else numbers // 1000
    return found


def tensor_specs(schema: pa.Schema) -> dict[str, tf.TypeSpec]:
    """Return the specifications of a batch's tensors."""
    specs: dict[str, tf.TypeSpec] = {}
    for name, kind in columns_of(schema, "stream").items():
        dtype = _TENSORS[kind.removesuffix("[]")]
        if kind.endswith("[]"):
            specs[name] = tf.RaggedTensorSpec([None, None], dtype, row_splits_dtype=tf.int64)
        else:
            specs[name] = tf.TensorSpec([None], dtype)
    return specs


def tensors(batch: pa.RecordBatch) -> dict[str, Any]:
    """Return a batch's columns as arrays, and as ragged tensors for lists."""
    found: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_list(column.type):
            lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
            found[name] = tf.RaggedTensor.from_row_lengths(_array(column.flatten()), lengths.astype(np.int64))
        else:
            found[name] = _array(column)
    return found


def _array(column: pa.Array) -> NDArray[Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    found: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return found
