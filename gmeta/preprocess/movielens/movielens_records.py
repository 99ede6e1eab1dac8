"""Parsing of the lines of MovieLens' files, and the mapping of their attributes to numbers.

The functions are pure functions from the bytes of one line to numbers; they raise `BadRecord` and don't know
the file. Lines are read as bytes: the only text that isn't ASCII is in titles and links (ISO 8859-1 in
``u.item`` and in ``movies.dat`` as published, UTF-8 in some copies), and no attribute uses it.

Attributes, which have the same numbers in both layouts:

==========  ================================================================================
year        of release; 0 if unknown
genre       a list of indices into `GENRES`, ascending; ``[0]`` if the item names none
gender      0 female, 1 male
age         bucket 0..6: how many of 18, 25, 35, 45, 50, 56 the age reaches
occupation  ML-100K: line in ``u.occupation``, from 0; ML-1M: the code in ``users.dat``
area        first character of the postal code in base 36 (a digit, or A=10 to Z=35), else 36
==========  ================================================================================
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from gmeta.preprocess.bad_records import BadRecord, Reason

GENRES = (
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)
"""The genres in the order of ML-100K's ``u.genre``; ML-1M uses the same names, without the first."""

USER_COLUMNS = ("gender", "age", "occupation", "area")
ITEM_COLUMNS = ("year", "genre")
AGE_THRESHOLDS = (18, 25, 35, 45, 50, 56)
MIN_RATING, MAX_RATING = 0.5, 5.0
UNKNOWN_YEAR, UNKNOWN_GENRE, OTHER_AREA = 0, 0, 36
OCCUPATIONS_1M = 21

_GENRE_INDEX = {name.encode(): index for index, name in enumerate(GENRES)}
_GENDERS = {b"F": 0, b"M": 1}
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DATE_100K = re.compile(rb"[0-9]{1,2}-[A-Z][a-z]{2}-([0-9]{4})")
_TITLE_YEAR_1M = re.compile(rb"\(([0-9]{4})\)\s*$")
_INT64_DIGITS = 18  # any number of this many digits fits

UserRow = tuple[int, int, int, int]
ItemRow = tuple[int, tuple[int, ...]]


def split_fields(line: bytes, separator: bytes, count: int) -> list[bytes]:
    """Split a line into its fields.

    Raises:
      BadRecord: There are fewer or more than ``count``.
    """
    fields = line.split(separator)
    if len(fields) != count:
        reason = Reason.MISSING_FIELD if len(fields) < count else Reason.EXTRA_FIELD
        raise BadRecord(
            reason, f"{count} fields separated by {show(separator)} expected, got {len(fields)}: {show(line)}"
        )
    return fields


def show(text: bytes, most: int = 60) -> str:
    """Format bytes for a message: quoted, shortened, and escaped where they aren't printable ASCII."""
    return repr(text if len(text) <= most else text[:most] + b"...")[1:]


def parse_integer(text: bytes, name: str) -> int:
    """Parse a whole number of ASCII digits, without sign: an id or a timestamp.

    This is stricter than ``int``, which takes signs, spaces and underscores.

    Raises:
      BadRecord: The text is no such number, or needs more than 63 bits.
    """
    if not text.isdigit():
        raise BadRecord(Reason.NOT_A_NUMBER, f"{name} must be a whole number, got {show(text)}")
    if len(text) > _INT64_DIGITS:
        raise BadRecord(
            Reason.OUT_OF_RANGE, f"{name} must have at most {_INT64_DIGITS} digits, got {show(text)}"
        )
    return int(text)


def parse_rating(text: bytes) -> float:
    """Parse a rating of 0.5 to 5 stars. MovieLens-100K and -1M use 1, 2, 3, 4, 5; later sets use halves.

    Raises:
      BadRecord: The text isn't a finite number, or is out of range.
    """
    if not _NUMBER.fullmatch(text):
        raise BadRecord(Reason.NOT_A_NUMBER, f"rating must be a number, got {show(text)}")
    rating = float(text)
    if not MIN_RATING <= rating <= MAX_RATING:
        raise BadRecord(
            Reason.OUT_OF_RANGE, f"rating must be in {MIN_RATING:g}..{MAX_RATING:g}, got {show(text)}"
        )
    return rating


def user_row_100k(fields: Sequence[bytes], occupations: Mapping[bytes, int]) -> UserRow:
    """Parse the attributes of a line of ``u.user``: id, age, gender, occupation's name, postal code.

    Args:
      fields: The five fields.
      occupations: Name -> index, from ``u.occupation``.

    Raises:
      BadRecord: The age isn't a number, or the gender or the occupation isn't known.
    """
    _, age, gender, occupation, postal_code = fields
    if occupation not in occupations:
        raise BadRecord(Reason.UNKNOWN_CODE, f"occupation {show(occupation)} isn't in u.occupation")
    return _gender(gender), _age_bucket(age), occupations[occupation], area(postal_code)


def user_row_1m(fields: Sequence[bytes]) -> UserRow:
    """Parse the attributes of a line of ``users.dat``: id, gender, age group, occupation's code, postal code.

    Raises:
      BadRecord: As for `user_row_100k`; occupations are the codes 0..20.
    """
    _, gender, age, occupation, postal_code = fields
    code = parse_integer(occupation, "occupation")
    if code >= OCCUPATIONS_1M:
        raise BadRecord(Reason.UNKNOWN_CODE, f"occupation must be 0..{OCCUPATIONS_1M - 1}, got {code}")
    return _gender(gender), _age_bucket(age), code, area(postal_code)


def item_row_100k(fields: Sequence[bytes]) -> ItemRow:
    """Parse a line of ``u.item``: id, title, release date, video release date, link, 19 genre flags.

    One published item (267) has neither title nor date: an empty date is an unknown year.

    Raises:
      BadRecord: The date or a genre flag is of another form.
    """
    date, flags = fields[2], fields[5:]
    match = _DATE_100K.fullmatch(date)
    if date and match is None:
        raise BadRecord(
            Reason.NOT_A_NUMBER, f"release date must be like 01-Jan-1995 or empty, got {show(date)}"
        )
    for flag in flags:
        if flag not in (b"0", b"1"):
            raise BadRecord(Reason.UNKNOWN_CODE, f"a genre flag must be 0 or 1, got {show(flag)}")
    genres = tuple(index for index, flag in enumerate(flags) if flag == b"1")
    return int(match[1]) if match else UNKNOWN_YEAR, genres or (UNKNOWN_GENRE,)


def item_row_1m(fields: Sequence[bytes]) -> ItemRow:
    """Parse a line of ``movies.dat``: id, title that ends in the year, genres joined by ``|``.

    Raises:
      BadRecord: A genre isn't in `GENRES`.
    """
    _, title, names = fields
    match = _TITLE_YEAR_1M.search(title)
    genres = set()
    for name in filter(None, names.split(b"|")):
        if name not in _GENRE_INDEX:
            raise BadRecord(Reason.UNKNOWN_CODE, f"genre {show(name)} isn't one of MovieLens' {len(GENRES)}")
        genres.add(_GENRE_INDEX[name])
    return int(match[1]) if match else UNKNOWN_YEAR, tuple(sorted(genres)) or (UNKNOWN_GENRE,)


def area(postal_code: bytes) -> int:
    """Read the first character of a postal code in base 36; 36 if it is no digit or letter, or is missing.

    Example:
      >>> area(b"85711"), area(b"V3N4P"), area(b"")
      (8, 31, 36)
    """
    first = postal_code[:1]
    return int(first, 36) if first.isalnum() else OTHER_AREA


def _gender(text: bytes) -> int:
    if text not in _GENDERS:
        raise BadRecord(Reason.UNKNOWN_CODE, f"gender must be F or M, got {show(text)}")
    return _GENDERS[text]


def _age_bucket(text: bytes) -> int:
    return bisect_right(AGE_THRESHOLDS, parse_integer(text, "age"))
