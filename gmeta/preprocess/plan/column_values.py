"""The conversion of one column of records, of any type, to int64 or float32; see the table in `normalise`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gmeta.core.data_manifest import hash_text
from gmeta.core.errors import ConfigError, first_line
from gmeta.preprocess.source import TIME, WHOLE_NUMBER, Reason
from gmeta.preprocess.table_spec import GAP, TIME_UNITS, ColumnSpec, Role, parse_comparison

Mask = NDArray[np.bool_]
ColumnFault = tuple[Reason, Mask, str]
"""A reason, the (N,) mask of the values that are bad for it, and the expectation."""

MISSING = frozenset(
    (
        "",
        "-",
        "--",
        ".",
        "?",
        "na",
        "n/a",
        "#n/a",
        "<na>",
        "nan",
        "nat",
        "null",
        "(null)",
        "none",
        "nil",
        "\\n",
    )
)
"""Lower-case texts that stand for a missing number, date or time; in a column of text they are text."""

WHOLE = r"[+-]?[0-9]+"
NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
INFINITE = r"(?i)[+-]?(?:inf|infinity)"
_CLOCK = (
    r"[T ](?P<hour>[0-9]{2})"
    r"(?::(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2})(?:\.(?P<fraction>[0-9]{1,9}))?)?)?"
    r"(?: ?(?:Z|UTC|GMT|(?P<sign>[+-])(?P<hours>[0-9]{2})(?::?(?P<minutes>[0-9]{2}))?))?"
)
DATE = r"(?i)(?P<year>[0-9]{4})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})" rf"(?:{_CLOCK}| ?(?:Z|UTC|GMT))?"
"""The forms of texts in RE2's notation, to be matched against a whole text. `DATE` also matches dates that
don't exist."""

_SURE_DIGITS = 18  # any number with at most this many digits fits an int64
EXACT = {pa.float64(): 2.0**53, pa.float32(): 2.0**24, pa.float16(): 2.0**11}
"""The bound below which no whole number in a floating-point type has been rounded."""


class Parsed(NamedTuple):
    """A column as numbers, with arbitrary numbers in place of bad values, and the bad values' faults."""

    values: NDArray[Any]
    faults: list[ColumnFault]


def numbers(given: pa.Array, column: ColumnSpec, hashed: bool, role: Role = "feature") -> Parsed:
    """Convert a column of one value per row.

    Args:
      given: The values.
      column: The column.
      hashed: Whether the values are hashes that an engine computed, as uint64.
      role: The column's role. uint64 numbers from 2^63 on become the int64 with the same bits, as in a batch
        of a model; they are out of range in a column of times or labels.
    """
    whole = TIME if role == "time" else WHOLE_NUMBER
    fill = _gap(column) if column.default is None and column.gaps else column.default
    if fill is not None and pa.types.is_floating(given.type):
        given = pc.if_else(pc.is_nan(given), pa.scalar(None, given.type), given)
    if column.values is not None:
        return _mapped(given, column.values)
    missing = None if given.null_count == 0 else given.is_null().to_numpy(zero_copy_only=False)
    values: NDArray[Any]
    faults: list[ColumnFault]
    if hashed:
        values, faults = _fill(given, 0).view(np.int64), []
    elif column.hash:
        values, faults = _hashes(given)
    elif column.format is not None and not (
        pa.types.is_timestamp(given.type) or pa.types.is_date(given.type) or pa.types.is_null(given.type)
    ):
        values, faults, words = _formatted(given, column.format)
        if words is not None and words.any():
            missing = words if missing is None else missing | words
    elif is_text(given.type):
        is_whole = column.dtype == "int64"
        values, faults, words = _parse(given, whole if is_whole else "a number", whole=is_whole)
        if words is not None and words.any():
            missing = words if missing is None else missing | words
    elif column.dtype == "int64":
        values, faults = _whole(given, whole, is_id=role in ("feature", "task"))
    else:
        values, faults = _floats(given)
    null = missing
    if missing is not None:
        faults = [(reason, mask & ~missing, expected) for reason, mask, expected in faults]
    if values.dtype.kind == "f":
        not_a_number = np.isnan(values) if missing is None else np.isnan(values) & ~missing
        if not_a_number.any():
            if fill is None:
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
    if column.positive is not None:
        operator, bound = parse_comparison(column.positive)
        values = _COMPARE[operator](values, np.float32(bound)).astype(np.float32)
    if missing is not None and missing.any():
        if fill is None:
            if null is not None:
                faults.append((Reason.NULL, null, "given"))
        else:
            default = hash_text(fill) if isinstance(fill, str) else fill
            values = np.where(missing, np.asarray(default, values.dtype), values)
    return Parsed(values, faults)


_COMPARE: Mapping[str, np.ufunc] = {
    "==": np.equal,
    "=": np.equal,
    "!=": np.not_equal,
    ">=": np.greater_equal,
    "<=": np.less_equal,
    ">": np.greater,
    "<": np.less,
}


def _gap(column: ColumnSpec) -> float | str:
    """Return the value that stands for a gap, if gaps are a separate value."""
    if column.hash:
        return ""
    return float(GAP) if column.dtype == "int64" else float("nan")


def _mapped(given: pa.Array, numbers: Mapping[str, float]) -> Parsed:
    """Look each value up by its text; a number also matches a text of the same number."""
    text = given if is_text(given.type) else given.cast(pa.string())
    text = pc.utf8_trim_whitespace(text)
    coded = text.dictionary_encode()
    known = {word.strip(): number for word, number in numbers.items()}
    other = known.pop("*", float("nan"))
    numbered = ((_number(word), number) for word, number in known.items())
    by_number = {key: number for key, number in numbered if key is not None}

    def look_up(word: str) -> float:
        return known[word] if word in known else by_number.get(_number(word) or 0.0, other)

    table = np.array([*map(look_up, coded.dictionary.to_pylist()), other], np.float32)
    missing = given.is_null().to_numpy(zero_copy_only=False)
    values = table[np.where(missing, len(table) - 1, _fill(coded.indices, 0))]
    strange = np.isnan(values)
    faults = []
    for reason, mask, expected in (
        (Reason.NULL, strange & missing, "given"),
        (Reason.UNKNOWN_CODE, strange & ~missing, f"one of {', '.join(known)}"),
    ):
        if mask.any():
            faults.append((reason, mask, expected))
    return Parsed(values, faults)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _formatted(given: pa.Array, form: str) -> tuple[NDArray[Any], list[ColumnFault], Mask | None]:
    """Convert times of a form (`ColumnSpec.format`) to microseconds since 1970, UTC."""
    if form in TIME_UNITS:
        micros = TIME_UNITS[form]
        if micros <= 1:  # a double would round them
            if is_text(given.type):
                whole, faults, words = _parse(given, TIME, whole=True)
            else:
                whole, faults = _whole(given, TIME, is_id=False)
                words = None
            return (whole if micros == 1 else whole // 1000), faults, words
        if is_text(given.type):
            values, faults, words = _parse(given, f"{form} since 1970", whole=False)
        else:
            values, faults = _floats(given)
            words = None
        scaled = np.round(np.nan_to_num(values.astype(np.float64)) * micros)
        outside = ~(np.abs(scaled) < EXACT[pa.float64()] * 1000)
        if outside.any():
            faults = [*faults, (Reason.OUT_OF_RANGE, outside, f"{form} since 1970")]
        return np.where(outside, 0, scaled).astype(np.int64), faults, words
    import duckdb

    text = pc.utf8_trim_whitespace(given if is_text(given.type) else given.cast(pa.string()))
    absent = _mask(pc.is_in(pc.utf8_lower(text), pa.array(MISSING, text.type)))
    with duckdb.connect(":memory:") as connection:
        connection.register("given", pa.table({"x": text}))
        query = "SELECT epoch_us(try_strptime(x, $1)) AS t FROM given"
        try:
            found = pa.array(connection.execute(query, [form]).fetchnumpy()["t"], pa.int64())
        except duckdb.Error as error:
            raise ConfigError(f"format={form!r} isn't a form of times: {first_line(error)}") from error
    wrong = found.is_null().to_numpy(zero_copy_only=False) & ~absent
    faults = [(Reason.NOT_A_NUMBER, wrong, f"a time of the form {form!r}")] if wrong.any() else []
    return _fill(found, 0), faults, absent


def _whole(given: pa.Array, expected: str, *, is_id: bool) -> tuple[NDArray[Any], list[ColumnFault]]:
    """Convert a column of any type but text to int64 values."""
    kind = given.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros = given.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False)
        return _fill(micros.cast(pa.int64()), 0), []
    if pa.types.is_decimal(kind):
        with contextlib.suppress(pa.ArrowInvalid):  # some values have fractions, or are larger
            return _fill(given.cast(pa.int64()), 0), []
        try:
            return _whole(given.cast(pa.uint64()), expected, is_id=is_id)
        except pa.ArrowInvalid:
            given = given.cast(pa.float64())
            kind = given.type
    if pa.types.is_floating(kind):
        values = _fill(given.cast(pa.float64()), 0.0)
        wrong = np.isnan(values)
        whole, faults = _exact(values, EXACT[kind], expected)
        return whole, [(Reason.NAN, wrong, expected), *faults] if wrong.any() else faults
    if pa.types.is_uint64(kind):
        large = _fill(given, 0) >= np.uint64(1 << 63)
        faults = [(Reason.OUT_OF_RANGE, large, "an int64")] if large.any() and not is_id else []
        return _fill(given, 0).view(np.int64), faults
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return _fill(given.cast(pa.int64()), 0), []
    return _wrong(given, "int64", np.zeros(len(given), np.int64))


def _exact(values: NDArray[Any], bound: float, expected: str) -> tuple[NDArray[Any], list[ColumnFault]]:
    """Convert doubles to int64; refuse fractions, and whole numbers that may have been rounded."""
    fraction = np.isfinite(values) & (values != np.floor(values))
    large = ~fraction & (np.abs(values) >= bound)
    text = f"below 2^{int(np.log2(bound))} as a floating-point number: larger ones may be rounded"
    faults = [(Reason.NOT_A_NUMBER, fraction, expected), (Reason.OUT_OF_RANGE, large, text)]
    whole = np.where(large | fraction | np.isnan(values), 0, values).astype(np.int64)
    return whole, [fault for fault in faults if fault[1].any()]


def _floats(given: pa.Array) -> tuple[NDArray[Any], list[ColumnFault]]:
    """Convert a column of any type but text to float64 values, with NaN for null."""
    kind = given.type
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
    given: pa.Array, expected: str, *, whole: bool
) -> tuple[NDArray[Any], list[ColumnFault], Mask | None]:
    """Parse numbers in text: all at once or, only if that fails, with a check of each value.

    Returns:
      int64 or float64 values, faults, and the values that are words for a missing one (None: there is none).
    """
    # Arrow would read 0x10 as 16.
    if whole and not pc.any(pc.starts_with(given, "0x", ignore_case=True)).as_py():
        for kind in (pa.int64(), pa.timestamp("us"), pa.timestamp("us", "UTC")):
            with contextlib.suppress(pa.ArrowInvalid):
                return _fill(given.cast(kind).cast(pa.int64()), 0), [], None
    elif not whole:
        with contextlib.suppress(pa.ArrowInvalid):
            return _fill(given.cast(pa.float64()), np.nan), [], None
    text = pc.utf8_trim_whitespace(given)
    words = pa.array(MISSING if whole else MISSING - {"nan"}, text.type)
    missing = _mask(pc.is_in(pc.utf8_lower(text), words))
    for word, number in (("true", "1"), ("false", "0")):
        text = pc.replace_substring_regex(text, f"(?i)^{word}$", number)
    good = _matches(text, NUMBER) | (_matches(text, f"{INFINITE}|[+-]?nan") & (not whole))
    if not whole:
        faults = [] if good.all() else [(Reason.NOT_A_NUMBER, ~good, expected)]
        return _cast(text, good), faults, missing
    found, faults = _whole_text(pc.if_else(pa.array(good), text, None), expected)
    dates = _matches(text, DATE)
    if dates.any():
        found[dates], impossible = _dates(text.filter(pa.array(dates)))
        if impossible.any():
            mask = np.zeros(len(text), np.bool_)
            mask[dates] = impossible
            faults.append((Reason.NOT_A_NUMBER, mask, "a date and time that exist"))
    faults.append((Reason.NOT_A_NUMBER, ~good & ~dates, expected))
    return found, [fault for fault in faults if fault[1].any()], missing


def _whole_text(text: pa.Array, expected: str) -> tuple[NDArray[Any], list[ColumnFault]]:
    """Convert numbers in text, or null, to int64 values."""
    text = pc.replace_substring_regex(text, r"^\+", "")
    digits = _matches(text, WHOLE)
    doubles = _cast(text, ~digits)
    found, faults = _exact(doubles, EXACT[pa.float64()], expected)
    large = np.zeros(len(text), np.bool_)
    for row in np.flatnonzero(digits & (_fill(pc.utf8_length(text), 0) > _SURE_DIGITS)).tolist():
        number = text[row].as_py()
        figures = number.lstrip("-0") or "0"  # Python refuses to read thousands of digits
        large[row] = len(figures) > 19 or not -(2**63) <= int(number[: number[0] == "-"] + figures) < 2**63
    if large.any():
        faults.append((Reason.OUT_OF_RANGE, large, "an int64"))
    plain = pc.if_else(pa.array(digits & ~large), text, None).cast(pa.int64())
    return np.where(digits, _fill(plain, 0), found), faults


def _dates(text: pa.Array) -> tuple[NDArray[np.int64], Mask]:
    """Convert texts of the form `DATE` to microseconds since 1970, UTC; also return which don't exist."""
    parts = pc.extract_regex(text, f"^(?:{DATE})$")

    def part(name: str, width: int = 2) -> NDArray[np.int64]:
        digits = pc.utf8_rpad(pc.struct_field(parts, name), width, "0")  # what isn't given is 0
        found: NDArray[np.int64] = digits.cast(pa.int64()).to_numpy()
        return found

    year, month, day = part("year", 4), part("month"), part("day")
    hour, minute, second, hours, minutes = map(part, ("hour", "minute", "second", "hours", "minutes"))
    micros = part("fraction", 9) // 1000
    west = _mask(pc.equal(pc.struct_field(parts, "sign"), "-"))
    months = ((year - 1970) * 12 + np.clip(month, 1, 12) - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (day - 1)
    impossible = (
        (month != np.clip(month, 1, 12))
        | (days.astype("datetime64[M]") != months)
        | (np.maximum(hour, hours) > 23)
        | (np.maximum(np.maximum(minute, minutes), second) > 59)
    )
    offset = (hours * 60 + minutes) * np.where(west, -1, 1)
    seconds = days.astype(np.int64) * 86_400 + (hour * 60 + minute - offset) * 60 + second
    return seconds * 1_000_000 + micros, impossible


def _matches(text: pa.Array, form: str) -> Mask:
    """Return which texts match a form as a whole; null matches none."""
    return _mask(pc.match_substring_regex(text, f"^(?:{form})$"))


def _mask(flags: pa.Array) -> Mask:
    found: Mask = _fill(flags, False)
    return found


def _cast(text: pa.Array, good: Mask) -> NDArray[np.float64]:
    """Parse the texts that ``good`` marks; the others become NaN."""
    found: NDArray[np.float64] = _fill(pc.if_else(pa.array(good), text, None).cast(pa.float64()), np.nan)
    return found


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
