"""Conversion of one column of records, of any type, to int64 or float32; see the table in `normalise`."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gmeta.preprocess.bad_records import WHOLE_NUMBER, Reason
from gmeta.preprocess.table_spec import ColumnSpec

Mask = NDArray[np.bool_]
ColumnFault = tuple[Reason, Mask, str]
"""A reason, the (N,) mask of the values that are bad for it, and what was expected."""

_WHOLE = r"^-?[0-9]+$"
_NUMBER = r"(?i)^-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$|^-?(nan|inf|infinity)$"
_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?)?Z?$"
_SURE_DIGITS = 18  # any number with at most this many digits fits an int64
_INT64_EDGE = 2.0**63


class Parsed(NamedTuple):
    """A column as numbers, with arbitrary numbers in place of bad values, and the bad values' faults."""

    values: NDArray[Any]
    faults: list[ColumnFault]


def hash_text(text: str) -> int:
    """Hash a text: return the last 8 bytes of the MD5 of its UTF-8, little endian, as a signed number.

    DuckDB's ``md5_number_lower(text)`` gives the same bits.

    Example:
      >>> hash_text("abc")
      8250560606382298838
    """
    return int.from_bytes(
        hashlib.md5(text.encode(), usedforsecurity=False).digest()[8:], "little", signed=True
    )


def numbers(given: pa.Array, column: ColumnSpec, hashed: bool, *, is_id: bool = True) -> Parsed:
    """Convert a column of one value per row.

    Args:
      given: The column.
      column: Its spec.
      hashed: Whether the engine has already hashed its texts, as uint64.
      is_id: Whether int64 values may be ids. Numbers from 2^63 on of type uint64 then become the int64 of the
        same bits, as in a batch of a model; they are out of range in a column of times or labels.
    """
    if column.default is not None and pa.types.is_floating(given.type):
        given = pc.if_else(pc.is_nan(given), pa.scalar(None, given.type), given)
    missing = None if given.null_count == 0 else given.is_null().to_numpy(zero_copy_only=False)
    values: NDArray[Any]
    faults: list[ColumnFault]
    if hashed:
        values, faults = _fill(given, 0).view(np.int64), []
    elif column.hash:
        values, faults = _hashes(given)
    elif column.dtype == "int64":
        values, faults = _whole(given, is_id)
    else:
        values, faults = _floats(given)
    if missing is not None:
        faults = [(reason, mask & ~missing, expected) for reason, mask, expected in faults]
    if values.dtype.kind == "f":
        not_a_number = np.isnan(values) if missing is None else np.isnan(values) & ~missing
        if not_a_number.any():
            if column.default is None:
                faults.append((Reason.NAN, not_a_number, "a number"))
            missing = not_a_number if missing is None else missing | not_a_number
    for bound, outside, sign in ((column.min, np.less, ">="), (column.max, np.greater, "<=")):
        if bound is not None:
            mask = outside(values, bound)
            mask = mask if missing is None else mask & ~missing
            if mask.any():
                faults.append((Reason.OUT_OF_RANGE, mask, f"{sign} {bound:g}"))
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32) + np.float32(0)  # -0.0 becomes 0.0
        infinite = np.isinf(narrow)
        if infinite.any():
            faults.append((Reason.OUT_OF_RANGE, infinite, "finite, in float32"))
        values = narrow
    if missing is not None and missing.any():
        if column.default is None:
            null = given.is_null().to_numpy(zero_copy_only=False)
            faults.append((Reason.NULL, null, "given"))
        else:
            text = isinstance(column.default, str)
            default = hash_text(str(column.default)) if text else column.default
            values = np.where(missing, np.asarray(default, values.dtype), values)
    return Parsed(values, faults)


def _whole(given: pa.Array, is_id: bool) -> tuple[NDArray[Any], list[ColumnFault]]:
    """Convert a column to int64 values."""
    kind, expected = given.type, WHOLE_NUMBER
    if is_text(kind):
        return _parse(given, pa.int64(), _WHOLE, expected)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros = given.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False)
        return _fill(micros.cast(pa.int64()), 0), []
    if pa.types.is_decimal(kind):
        with contextlib.suppress(pa.ArrowInvalid):  # some values have fractions, or are larger
            return _fill(given.cast(pa.int64()), 0), []
        try:
            return _whole(given.cast(pa.uint64()), is_id)
        except pa.ArrowInvalid:
            given = given.cast(pa.float64())
            kind = given.type
    if pa.types.is_floating(kind):
        values = _fill(given.cast(pa.float64()), 0.0)
        fraction = ~np.isnan(values) & (values != np.floor(values))
        large = ~((values >= -_INT64_EDGE) & (values < _INT64_EDGE))
        wrong = np.isnan(values)
        faults = [
            (Reason.NAN, wrong, expected),
            (Reason.NOT_A_NUMBER, fraction, expected),
            (Reason.OUT_OF_RANGE, large & ~wrong, "an int64"),
        ]
        whole = np.where(large | fraction, 0, values).astype(np.int64)
        return whole, [fault for fault in faults if fault[1].any()]
    if pa.types.is_uint64(kind):
        large = _fill(given, 0) >= np.uint64(1 << 63)
        faults = [(Reason.OUT_OF_RANGE, large, "an int64")] if large.any() and not is_id else []
        return _fill(given, 0).view(np.int64), faults
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return _fill(given.cast(pa.int64()), 0), []
    return _wrong(given, "int64", np.zeros(len(given), np.int64))


def _floats(given: pa.Array) -> tuple[NDArray[Any], list[ColumnFault]]:
    """Convert a column to float64 values, with NaN for null."""
    kind = given.type
    if is_text(kind):
        return _parse(given, pa.float64(), _NUMBER, "a number")
    if pa.types.is_float32(kind):
        return _fill(given, np.nan), []
    if (
        pa.types.is_floating(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    ):
        if pa.types.is_boolean(kind):
            given = given.cast(pa.int8())
        return _fill(given.cast(pa.float64(), safe=False), np.nan), []
    return _wrong(given, "float32", np.zeros(len(given), np.float64))


def _parse(
    given: pa.Array, kind: pa.DataType, form: str, expected: str
) -> tuple[NDArray[Any], list[ColumnFault]]:
    """Parse numbers in text: all at once or, only if that fails, with a check of each value."""
    whole = kind == pa.int64()
    fill = 0 if whole else np.nan
    # Arrow would read 0x10 as 16.
    if not (whole and pc.any(pc.starts_with(given, "0x", ignore_case=True)).as_py()):
        with contextlib.suppress(pa.ArrowInvalid):
            return _fill(given.cast(kind), fill), []
    text = pc.replace_substring_regex(pc.utf8_trim_whitespace(given), r"^\+", "")
    for word, number in (("true", "1"), ("false", "0")):
        text = pc.replace_substring_regex(text, f"(?i)^{word}$", number)
    if whole:
        text = _dates_as_numbers(pc.replace_substring_regex(text, r"^(-?[0-9]+)\.0*$", r"\1"))
    good = _fill(pc.fill_null(pc.match_substring_regex(text, form), True), True)
    faults = [(Reason.NOT_A_NUMBER, ~good, expected)]
    if whole:
        large = np.zeros(len(given), np.bool_)
        for row in np.flatnonzero(good & (_fill(pc.utf8_length(text), 0) > _SURE_DIGITS)).tolist():
            large[row] = not -(2**63) <= int(text[row].as_py()) < 2**63
        faults.append((Reason.OUT_OF_RANGE, large, "an int64"))
        good &= ~large
    text = pc.if_else(pa.array(good), text, None)
    return _fill(text.cast(kind), fill), [fault for fault in faults if fault[1].any()]


def _dates_as_numbers(text: pa.Array) -> pa.Array:
    """Replace dates and times in text by microseconds since 1970, UTC."""
    dates = pc.match_substring_regex(text, _DATE)
    if not pc.any(dates).as_py():
        return text
    plain = pc.replace_substring_regex(pc.if_else(dates, text, None), "Z$", "")
    try:
        micros = plain.cast(pa.timestamp("us")).cast(pa.int64())
    except pa.ArrowInvalid:  # an impossible date, such as the 30th of February: no date is replaced
        return text
    return pc.coalesce(micros.cast(pa.string()), text.cast(pa.string()))


def _hashes(given: pa.Array) -> tuple[NDArray[Any], list[ColumnFault]]:
    kind = given.type
    if pa.types.is_null(kind):
        return np.zeros(len(given), np.int64), []
    if not (is_text(kind) or pa.types.is_integer(kind)):
        return _wrong(given, "text or whole numbers", np.zeros(len(given), np.int64))
    coded = given.cast(pa.string()).dictionary_encode()
    table = np.array([hash_text(text) for text in coded.dictionary.to_pylist()], np.int64)
    codes = _fill(coded.indices, 0)
    return (table[codes] if len(table) else np.zeros(len(given), np.int64)), []


def _wrong(given: pa.Array, wanted: str, values: NDArray[Any]) -> tuple[Any, list[ColumnFault]]:
    return values, [(Reason.WRONG_TYPE, np.ones(len(given), np.bool_), f"{wanted}, not {given.type}")]


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _fill(array: pa.Array, value: Any) -> NDArray[Any]:
    """Return an array as a NumPy array, with ``value`` for null."""
    if array.null_count:
        array = pc.fill_null(array, pa.scalar(value, array.type))
    return array.to_numpy(zero_copy_only=False)
