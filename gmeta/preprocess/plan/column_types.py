"""The types of a table's columns, decided by the values of all rows of all files.

An engine records which kinds of values a column has (`Findings`), in any order and in any parts, and `decide`
derives a type from them. So a type depends neither on the order of files nor on the position of an odd row.
The types are

=======  ===================================================================================================
int64    whole numbers, also with a decimal point in text (``7.0``), and booleans
float32  numbers, some with a fraction; columns of a floating-point type, unless all values are whole
         and some are ids that float32 would round
times    dates and times, which become microseconds since 1970, UTC
text     anything else: ids, which are hashed; also whole numbers, some of which begin with a zero (``007``),
         or are so large that no int64 holds them
none     no value at all, but words such as ``-`` and ``NULL`` (`column_values.MISSING`)
=======  ===================================================================================================

Values that would be lost or confused with each other don't decide a type (`Doubt`); the user must set it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import NamedTuple

import pyarrow as pa

from gmeta.preprocess.table_spec import Role


class Seen(IntFlag):
    """Kinds of values; each value has one kind, and may also have an attribute."""

    MISSING = 1 << 0  # null, NaN, or a word for it
    WHOLE = 1 << 1  # digits, that an int64 holds
    BIG = 1 << 2  # digits, that no int64 holds
    PADDED = 1 << 3  # digits that begin with a zero
    ROUND = 1 << 4  # a whole number with a point or an exponent, or of a floating-point type and not FLOAT
    INEXACT = 1 << 5  # such a number, so large that another number may have been rounded to it
    FRACTION = 1 << 6
    BOOL = 1 << 7
    DATE = 1 << 8  # in the form of a date or time, whether it exists or not
    TEXT = 1 << 9
    LIST = 1 << 10
    OTHER = 1 << 11  # a value of several parts
    LARGE = 1 << 12  # attribute of digits: float32 may not hold them
    POINT = 1 << 13  # attribute of numbers: not only digits and an exponent, as a hexadecimal id might be
    FLOAT = 1 << 14  # a whole number of a floating-point type, small enough for float32


_NOTHING = Seen(0)
NUMBERS = Seen.WHOLE | Seen.BIG | Seen.ROUND | Seen.INEXACT | Seen.FLOAT | Seen.FRACTION
QUOTED = 16
"""The shift of the kinds of values that are text by their type, though they may look like numbers."""

_UNITS = ("seconds", "milliseconds", "microseconds", "nanoseconds")
_YEARS = 631_152_000, 4_102_444_800  # 1990 to 2100, in seconds
TIME_EDGES = tuple(float(year * 1000**unit) for unit in range(4) for year in _YEARS)
"""The edges of the regions that `Findings.times` counts: times since 1970 in a unit, a gap, the next unit."""


def unit_of(time: int) -> str | None:
    """Return the unit in which a time since 1970 lies in the years 1990 to 2100, if there is one."""
    place = bisect_right(TIME_EDGES, time)
    return _UNITS[place // 2] if place % 2 else None


class Example(NamedTuple):
    """Values to show in a message.

    Attributes:
      words: Their name.
      kinds: Their kinds.
      region: The region of `TIME_EDGES` that they are in, instead of kinds.
      quoted: Whether they are text by their type.
      whole: Whether they are whole values, and not elements of lists.
    """

    words: str
    kinds: Seen
    region: int | None = None
    quoted: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Doubt:
    """Values that don't decide a type.

    Attributes:
      examples: The conflicting values.
      advice: What the user can do.
    """

    examples: tuple[Example, ...]
    advice: str


@dataclass(frozen=True)
class Findings:
    """The kinds of a column's values.

    Attributes:
      plain: The kinds of its values.
      quoted: The kinds of its values that are text by their type.
      times: How many numbers are in each region of `TIME_EDGES`; counted only for the time.
      elements: The kinds of the elements of its lists.
    """

    plain: Seen = _NOTHING
    quoted: Seen = _NOTHING
    times: tuple[int, ...] = (0,) * (len(TIME_EDGES) - 1)
    elements: Findings | None = field(default=None)

    @classmethod
    def of_bits(cls, bits: int, times: Sequence[int] | None = None) -> Findings:
        """Decode the bits that an engine has combined by "or"."""
        plain = Seen(bits & ((1 << QUOTED) - 1))
        quoted = Seen(bits >> QUOTED)
        return cls(plain, quoted, tuple(times)) if times else cls(plain, quoted)

    def merge(self, other: Findings) -> Findings:
        """Return the survey of both parts of a column."""
        elements = self.elements or other.elements
        if self.elements and other.elements:
            elements = self.elements.merge(other.elements)
        times = tuple(a + b for a, b in zip(self.times, other.times, strict=True))
        return Findings(self.plain | other.plain, self.quoted | other.quoted, times, elements)

    @property
    def kinds(self) -> Seen:
        """The kinds of all values but missing ones."""
        return (self.plain | self.quoted) & ~Seen.MISSING


def decide(found: Findings, role: Role, dtype: str | None = None) -> pa.DataType | Doubt:
    """Decide the type of a column.

    Args:
      found: The kinds of all its values.
      role: The column's role.
      dtype: The type that the spec sets.

    Returns:
      The type, ``pa.null()`` for a column without a value; or the `Doubt`, if the values don't decide it.
    """
    if found.kinds & (Seen.LIST | Seen.OTHER):
        return _parts(found, role)
    if role == "time":
        return _time(found, dtype)
    if role == "label":
        return _label(found)
    return _feature(found, role)


def _parts(found: Findings, role: Role) -> pa.DataType | Doubt:
    single = found.kinds & ~(Seen.LIST | Seen.OTHER)
    if single or (Seen.LIST in found.kinds and Seen.OTHER in found.kinds):
        some = [("lists", Seen.LIST), ("values of several parts", Seen.OTHER), ("single values", single)]
        doubt = _doubt("write all in one form", *some, found=found)
        return replace(doubt, examples=tuple(each._replace(whole=True) for each in doubt.examples))
    if Seen.OTHER in found.kinds:
        return pa.struct([])
    elements = decide(found.elements or Findings(), "feature")
    return elements if isinstance(elements, Doubt) else pa.list_(elements)


def _feature(found: Findings, role: Role) -> pa.DataType | Doubt:
    plain, quoted = found.plain, found.quoted
    text = plain & (Seen.TEXT | Seen.PADDED) | quoted & ~(Seen.MISSING | Seen.DATE | Seen.LARGE | Seen.POINT)
    dates = found.kinds & Seen.DATE
    numbers = plain & NUMBERS
    if text:
        if not dates and Seen.POINT not in plain:
            return pa.string()
        in_text = plain & (Seen.TEXT | Seen.PADDED)
        if role == "task":
            advice = "write all as text or all as whole numbers"
        else:
            dtype = "int64" if dates else "float32"
            of_text = in_text and Seen.FLOAT not in plain
            hashed = f"or {'hash = true for ids' if of_text else 'write ids as text'}"
            advice = f'set in --spec dtype = "{dtype}", and text is bad, {hashed}'
        numbers = numbers if Seen.POINT in plain else Seen(0)
        doubt = _doubt(advice, ("numbers", numbers), ("dates", dates), found=found)
        example = Example("text", in_text or text, quoted=not in_text)
        return Doubt((*doubt.examples, example), advice)
    if dates:
        if numbers or Seen.BOOL in plain:
            some = [("dates", dates), ("numbers", numbers | Seen.BOOL)]
            return _doubt("write all in one form, or set hash = true in --spec", *some, found=found)
        return pa.timestamp("us")
    if Seen.FRACTION in plain:
        if Seen.LARGE in plain and role == "feature":
            some = [("fractions", Seen.FRACTION), ("whole numbers that float32 would round", Seen.LARGE)]
            advice = 'set in --spec dtype = "float32", which rounds them, or hash = true for ids'
            return _doubt(advice, *some, found=found)
        return pa.float64()
    if Seen.BIG in numbers and not numbers & ~(Seen.WHOLE | Seen.BIG) and Seen.POINT not in plain:
        return pa.string()
    if numbers & (Seen.BIG | Seen.INEXACT):
        big = ("whole numbers that an int64 can't hold", Seen.BIG)
        rounded = ("whole numbers that a floating-point number may have rounded", Seen.INEXACT)
        advice = (
            "if it is an id, write it as text or digits, and set hash = true in --spec; else set "
            'dtype = "float32"'
        )
        return _doubt(advice, big, rounded, found=found)
    if numbers == Seen.FLOAT and role == "feature" and Seen.BOOL not in plain:
        return pa.float64()
    return pa.int64() if numbers or Seen.BOOL in plain else pa.null()


def _time(found: Findings, dtype: str | None) -> pa.DataType | Doubt:
    kinds = found.kinds
    numbers = kinds & (NUMBERS | Seen.PADDED)
    inside, gaps = found.times[::2], found.times[1::2]
    units = [unit for unit, count in enumerate(inside) if count]
    shown = [Example(_UNITS[unit], Seen(0), 2 * unit) for unit in units]
    if dtype == "float32":
        if not units:
            return pa.float64()
        return Doubt(tuple(shown), 'float32 would round them: leave out dtype = "float32"')
    if Seen.FRACTION in kinds and len(units) != 1:
        advice = "name their unit with --time-format seconds (or milliseconds), or write times as dates"
        return _doubt(advice, ("fractions", Seen.FRACTION), found=found)
    if Seen.DATE in kinds and numbers and units != [2]:
        some = Example("dates", Seen.DATE), *(shown or [Example("numbers", numbers)])
        return Doubt(some, "write all times in one form")
    if not (numbers or Seen.DATE in kinds) and Seen.TEXT in kinds:
        advice = (
            "give its form with --time-format, such as '%m/%d/%Y %I:%M:%S %p' or '%d %b %Y', or write whole "
            "numbers, or dates such as 2014-02-27 10:00:00 or 2014-02-27T10:00:00+08:00"
        )
        return _doubt(advice, ("text", Seen.TEXT), found=found)
    if len(units) > 1 and sum(gaps[units[0] : units[-1]]) * 100 <= sum(inside):
        # Times of one unit that range so widely would fill the gaps too.
        advice = "write all times in one unit, or bound them by min and max in --spec, and others are bad"
        return Doubt(tuple(shown), advice)
    if Seen.FRACTION in kinds:
        return pa.duration(("s", "ms", "us", "ns")[units[0]])
    return pa.int64() if numbers or Seen.DATE not in kinds else pa.timestamp("us")


def _label(found: Findings) -> pa.DataType | Doubt:
    kinds = found.kinds
    if kinds & (Seen.TEXT | Seen.DATE) and not kinds & (NUMBERS | Seen.PADDED | Seen.BOOL):
        some = [("text", kinds & Seen.TEXT), ("dates", kinds & Seen.DATE)]
        advice = "name the number of each, such as --label 'COLUMN: this=1, *=0', or write numbers"
        return _doubt(advice, *some, found=found)
    return pa.float64()


def _doubt(advice: str, *some: tuple[str, Seen], found: Findings) -> Doubt:
    return Doubt(tuple(Example(words, kinds) for words, kinds in some if kinds & found.kinds), advice)
