"""The encoding of a value in a store: the concatenated numbers of the column's type, nothing else.

A single value is 8 bytes (int64) or 4 bytes (float32), little-endian unless stated otherwise. A list is the
concatenation of its values, so an empty list has no bytes. ``numpy.ndarray.tobytes`` writes this format, and
``java.nio.ByteBuffer`` reads it. A missing value has no cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.schema import Column

ByteOrder = Literal["little", "big"]
Cell = bytes | None


def arrow_type(column: Column) -> Any:
    """Return the Arrow type of a column's values: ``int64``, ``float``, or a list of one of them."""
    item = pa.int64() if column.dtype == "int64" else pa.float32()
    return pa.list_(item) if column.is_list else item


def arrow_schema(columns: Sequence[Column]) -> Any:
    """Return the Arrow schema of rows of these columns; every value may be null."""
    return pa.schema([pa.field(column.name, arrow_type(column)) for column in columns])


def column_of(name: str, kind: Any) -> Column:
    """Return the column that an Arrow type represents.

    Raises:
      DataError: The type is neither int64 nor float32 nor a list of them.
    """
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    item = kind.value_type if is_list else kind
    if item == pa.int64():
        return Column(name, "int64", is_list)
    if item == pa.float32():
        return Column(name, "float32", is_list)
    raise DataError(f"column {name!r} is of type {kind}; int64, float (32 bits) and lists of them are stored")


def encode(array: Any, order: ByteOrder = "little") -> list[Cell]:
    """Encode an Arrow array as cells; null becomes None."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_list(array.type):
        starts = array.offsets.to_numpy().tolist()
        numbers = array.values.to_numpy(zero_copy_only=False)
    else:
        starts = range(len(array) + 1)
        numbers = array.fill_null(0).to_numpy(zero_copy_only=False)
    width, data = numbers.itemsize, numbers.astype(_dtype(numbers.dtype.name, order)).tobytes()
    return [
        data[width * starts[row] : width * starts[row + 1]] if there else None
        for row, there in enumerate(valid.tolist())
    ]


def decode(
    cells: Sequence[Sequence[Cell]],
    columns: Sequence[Column],
    keys: npt.NDArray[np.int64],
    where: str,
    order: ByteOrder = "little",
) -> Any:
    """Decode cells into rows, a RecordBatch; None becomes null.

    Args:
      cells: For each column, the cells of the keys.
      columns: The columns.
      keys: The keys of the rows, for the error.
      where: The store and the table, for the error.
      order: The order of the bytes.

    Raises:
      DataError: A cell doesn't have the size of its type.
    """
    arrays = []
    for column, own in zip(columns, cells, strict=True):
        try:
            arrays.append(_decode(own, column, keys, order))
        except DataError as error:
            advice = "declare the columns as they were written"
            raise DataError(str(error), path=where, advice=advice) from error
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _decode(cells: Sequence[Cell], column: Column, keys: npt.NDArray[np.int64], order: ByteOrder) -> Any:
    lengths = np.fromiter((-1 if cell is None else len(cell) for cell in cells), np.int64, len(cells))
    there = lengths >= 0
    dtype = _dtype(column.dtype, order)
    wrong = there & ((lengths % dtype.itemsize != 0) if column.is_list else (lengths != dtype.itemsize))
    if wrong.any():
        row = int(wrong.argmax())
        whole = "a list has a multiple of" if column.is_list else "there should be"
        raise DataError(
            f"key {keys[row]} has {lengths[row]} bytes in column {column.name!r}; of {column.dtype} {whole} "
            f"{dtype.itemsize}"
        )
    data = b"".join([cell for cell in cells if cell is not None])
    numbers = np.frombuffer(data, dtype).astype(column.dtype, copy=False)
    if column.is_list:
        return list_array(numbers, np.where(there, lengths, 0) // dtype.itemsize, there)
    values = np.zeros(len(cells), column.dtype)
    values[there] = numbers
    return pa.array(values, mask=~there)


def list_array(numbers: npt.NDArray[Any], lengths: npt.NDArray[Any], there: npt.NDArray[np.bool_]) -> Any:
    """Create an Arrow array of lists from their joined numbers, their lengths, and which aren't null."""
    offsets = np.fromiter(accumulate(lengths.tolist(), initial=0), np.int32, len(lengths) + 1)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbers), mask=pa.array(~there))


def _dtype(name: str, order: ByteOrder) -> np.dtype[Any]:
    return np.dtype(name).newbyteorder("<" if order == "little" else ">")


# Requested keys and times: checked, made distinct, and cut into requests.

Ints = npt.NDArray[np.int64]
NEWEST = 2**63 - 2
"""The largest version; HBase has the same limit."""


def int64_vector(what: str, values: npt.ArrayLike, name: str) -> Ints:
    """Convert values to (n,) int64; uint64 are taken as the int64 of the same bits.

    Raises:
      ConfigError: They are of another form; the error begins with ``name``.
    """
    array = np.asarray(values)
    if array.shape == (0,):
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{name}: {what} must be (n,) int64, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def times(as_of: npt.ArrayLike | None, count: int, resolution: int, name: str) -> Ints | None:
    """Return the time of each of ``count`` keys, rounded down to a multiple of the resolution; None stays.

    Raises:
      ConfigError: ``as_of`` is neither one version nor one for each key.
    """
    if as_of is None:
        return None
    when = np.asarray(as_of)
    if when.shape == (count,) == (0,):
        return np.zeros(0, np.int64)
    whole = when.dtype.kind in "iu" and when.shape in ((), (count,))
    if not whole or (when < 0).any() or (when > np.iinfo(np.int64).max).any():
        seen = f", from {when.min()} to {when.max()}" if whole else ""
        raise ConfigError(
            f"{name}: as_of must be one version, in [0, 2^63), or one for each of {count} keys, got "
            f"{when.dtype} of shape {when.shape}{seen}"
        )
    return np.broadcast_to(when.astype(np.int64) // resolution * resolution, count)


def distinct(keys: Ints, as_of: Ints | None) -> tuple[Ints, Ints | None, Ints]:
    """Return the distinct pairs, sorted by as_of and then key, and each pair's place among them."""
    unique, inverse = np.unique(keys, return_inverse=True)
    if as_of is None or len(keys) == 0:
        return unique, None if as_of is None else as_of[:0], inverse
    moments, at = np.unique(as_of, return_inverse=True)
    pairs, inverse = np.unique(at * len(unique) + inverse, return_inverse=True)
    return unique[pairs % len(unique)], moments[pairs // len(unique)], inverse


def request_slices(count: int, most: int, one_time: Ints | None) -> Iterator[slice]:
    """Yield the rows of each request: at most ``most``, all of the same time if ``one_time`` is true."""
    ends = [count]
    if one_time is not None:
        ends = [*(np.flatnonzero(np.diff(one_time)) + 1).tolist(), count]
    begin = 0
    for end in ends:
        for first in range(begin, end, most):
            yield slice(first, min(first + most, end))
        begin = end


# The policy for fetching features, which applies to every store, and its counters.

Number = int | float
Missing = Literal["raise", "null", "default"]
MISSING: tuple[Missing, ...] = ("raise", "null", "default")


@dataclass(frozen=True)
class FetchPolicy:
    """How a `FeatureSource` fetches rows.

    Attributes:
      batch_rows: The maximum number of rows of one request to the store.
      timeout: Maximum seconds for a request; None sets no limit, and saves a thread for each request.
      attempts: The maximum number of attempts at a request whose connection fails or that times out. A
        request that the store refuses isn't repeated.
      backoff: Seconds before the second attempt; the wait doubles before each further attempt. Each wait is
        shortened at random, by up to a half, so that ranks don't all retry at the same time.
      cache_rows: The maximum number of cached rows for each set of columns; the least recently used are
        dropped first. The cache also records that a key has no value. 0 disables the cache.
      cache_seconds: How long a cached row counts as the newest one if no ``as_of`` is given. Rows of an
        ``as_of`` are cached while space permits, so later writes to past versions aren't seen.
      resolution: ``as_of`` is rounded down to a multiple of this. A row is then at most that much older than
        necessary, never newer, and rows of one multiple share a request and an entry in the cache.
      missing: How a missing value is treated. ``"raise"``: a `DataError` names it. ``"null"``: it is null.
        ``"default"``: it is the column's value in `defaults`.
      defaults: Column -> a number, or for a list column a sequence of numbers. Other columns have 0, or an
        empty list.

    Raises:
      ConfigError: A number is out of range, or the rule is unknown.
    """

    batch_rows: int = 1024
    timeout: float | None = 5.0
    attempts: int = 3
    backoff: float = 0.1
    cache_rows: int = 100_000
    cache_seconds: float = 60.0
    resolution: int = 1
    missing: Missing = "raise"
    defaults: Mapping[str, Number | Sequence[Number]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"batch_rows": 1, "attempts": 1, "backoff": 0, "cache_rows": 0, "resolution": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"FetchPolicy: {name}={getattr(self, name)} must be at least {low}")
        if not self.cache_seconds > 0 or (self.timeout is not None and not self.timeout > 0):
            raise ConfigError(
                f"FetchPolicy: timeout={self.timeout} and cache_seconds={self.cache_seconds} must be above 0 "
                "(timeout=None sets no limit)"
            )
        if self.missing not in MISSING:
            raise ConfigError(
                f"FetchPolicy: missing must be 'raise', 'null' or 'default', got {self.missing!r}"
            )


@dataclass(frozen=True)
class FetchCounts:
    """The counters of a `FeatureSource` since it was created.

    Attributes:
      rows: Requested keys, including repeated ones.
      distinct: Requested keys without repetitions within a call (and an ``as_of``).
      hits: Distinct keys found in the cache.
      misses: Distinct keys not found in the cache, which were fetched.
      requests: Requests made to the store, including repeated ones.
      retries: Repeated requests.
      timeouts: Requests that took too long.
      missing_keys: Distinct keys of a call that had none of the requested values.
      missing_values: Missing values, including those of the missing keys.
    """

    rows: int = 0
    distinct: int = 0
    hits: int = 0
    misses: int = 0
    requests: int = 0
    retries: int = 0
    timeouts: int = 0
    missing_keys: int = 0
    missing_values: int = 0


# The rule for values that a store lacks.

_SHOWN = 5


def settle_missing(
    rows: Any,
    columns: Sequence[Column],
    policy: FetchPolicy,
    counted: Counter[str],
    what: str,
    keys: Ints,
    as_of: Ints | None,
) -> Any:
    """Apply the policy to the nulls of some rows.

    Args:
      rows: A RecordBatch of n rows, null where there is no value.
      columns: Its columns.
      policy: The rule and the defaults.
      counted: The counters, whose ``missing_keys`` and ``missing_values`` are increased.
      what: The source and the table, for the error.
      keys: (n,), for the error.
      as_of: (n,) or None, for the error.

    Raises:
      DataError: The rule is to raise, and a value is missing.
    """
    absent = [array.is_null().to_numpy(zero_copy_only=False) for array in rows.columns]
    values = int(sum(nulls.sum() for nulls in absent))
    if values == 0:
        return rows
    counted["missing_values"] += values
    counted["missing_keys"] += int(np.logical_and.reduce(absent).sum())
    if policy.missing == "null":
        return rows
    if policy.missing == "raise":
        raise DataError(
            _describe(columns, absent, keys, as_of),
            path=what,
            advice="put it into the store, or take FetchPolicy(missing='default') or 'null'",
        )
    filled = [
        _fill(array, nulls, column, policy)
        for array, nulls, column in zip(rows.columns, absent, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(filled, schema=rows.schema)


def default_of(column: Column, policy: FetchPolicy) -> Any:
    """Return a column's default, as an Arrow array of one value.

    Raises:
      ConfigError: The default is of another type than the column.
    """
    value = policy.defaults.get(column.name, [] if column.is_list else 0)
    try:
        array = pa.array([value], arrow_type(column))
        if array.null_count == 0:
            return array
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        pass
    kind = f"a list of {column.dtype}" if column.is_list else f"one {column.dtype}"
    raise ConfigError(f"FetchPolicy: the default {value!r} of column {column.name!r} is not {kind}")


def _fill(array: Any, nulls: npt.NDArray[np.bool_], column: Column, policy: FetchPolicy) -> Any:
    if not nulls.any():
        return array
    places = np.where(nulls, len(array), np.arange(len(array)))
    return pa.concat_arrays([array, default_of(column, policy)]).take(pa.array(places))


def _describe(
    columns: Sequence[Column], absent: Sequence[npt.NDArray[np.bool_]], keys: Ints, as_of: Ints | None
) -> str:
    """Describe which keys lack a value in which columns."""
    bad = np.flatnonzero(np.logical_or.reduce(absent))
    named = []
    for row in bad[:_SHOWN].tolist():
        lacking = ", ".join(c.name for c, nulls in zip(columns, absent, strict=True) if nulls[row])
        when = "" if as_of is None else f" as of {as_of[row]}"
        named.append(f"key {keys[row]}{when} ({lacking})")
    more = f", and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return f"{len(bad)} of {len(keys)} keys lack a value: {', '.join(named)}{more}"
