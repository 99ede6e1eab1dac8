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

MeLU (Lee et al., KDD 2019) adds to MovieLens-1M data on each movie from a film encyclopaedia, a list of
every name (``m_actor.txt`` and seven more), and a split of the ratings by new and old users and movies. A
name's number is its line in its list, from 0, as in MeLU's own code. Its attributes:

==========  ==================================================================================================
year        of release; not a feature of MeLU
rate        film rating (G, PG, R and so on)
genre       a list; 25 genres, finer than MovieLens' own
director    a list; text in parentheses after a name, such as ``(co-director)``, is removed
actor       a list; parentheses are kept
writer      a list; text in parentheses is removed; not a feature of MeLU
gender      ``users.dat``
age         the group of ``users.dat``
occupation  the code of ``users.dat``
zipcode     its first five characters
==========  ==================================================================================================

An unknown value (``N/A``) is the entry ``nan`` of its list. A name that isn't in its list is bad; the
published files have no such name. Writers have no file: their list is made from the movies, ``nan`` and then
all names in the order of their bytes. List attributes are ascending and hold each number once.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import zlib
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from gmeta.core.errors import DataError
from gmeta.preprocess.source import BadRecord, Ints, Ragged, Reason, gather_ragged

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
      BadRecord: The text isn't such a number, or needs more than 63 bits.
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
      BadRecord: The date or a genre flag has another form.
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
    """Read the first character of a postal code in base 36; 36 if it isn't a digit or letter, or is missing.

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


# A raw input file: read once, for its lines and for its digest.


@dataclass(frozen=True)
class RawFile:
    """The bytes of a text file.

    The whole file is held in memory, so the digest is certainly that of the parsed bytes. The largest file
    that the local engine is meant for, MovieLens-1M's ratings, has 24 MB.

    Attributes:
      path: The path that it was read from.
      data: Its content; for a ``.gz`` file, the unpacked content.
    """

    path: Path
    data: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> RawFile:
        """Read a file.

        Raises:
          DataError: The file can't be read or unpacked, or holds only blank lines.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"can't read it: {error.strerror}", path=path) from error
        if path.suffix == ".gz":
            data = _unpack(data, path)
        if not data.strip():
            raise DataError("the file is empty", path=path, advice="fetch the data set again")
        return cls(path, data)

    @property
    def sha256(self) -> str:
        """The digest of the content, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def line_count(self) -> int:
        """The number of lines, including blank ones."""
        return self.data.count(b"\n") + (not self.data.endswith(b"\n"))

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that aren't blank, without their ends (LF or CRLF), with their numbers from 1."""
        for number, line in enumerate(io.BytesIO(self.data), start=1):
            stripped = line.rstrip(b"\r\n")
            if stripped:
                yield number, stripped


def _unpack(data: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"can't unpack it: {error}", path=path, advice="fetch the data set again") from error


# Attributes by id, in columns with a row for each user or item, so that a gather joins them to ratings.

IntColumn: TypeAlias = "Ints | Ragged"


@dataclass(frozen=True)
class AttributeTable:
    """Columns of attributes, with one row for each id.

    Rows are sorted by id, so the order of the lines in the raw file doesn't matter.

    Attributes:
      ids: (N,) int64, ascending, each once.
      lines: (N,) int64, the line that each row was read from.
      columns: Name -> (N,) int64, or ``(values, row_splits)`` for a list attribute.
    """

    ids: Ints
    lines: Ints
    columns: Mapping[str, IntColumn]

    @classmethod
    def build(
        cls,
        names: Sequence[str],
        rows: Mapping[int, tuple[int | tuple[int, ...], ...]],
        lines: Mapping[int, int],
    ) -> AttributeTable:
        """Make a table from parsed rows.

        Args:
          names: The attributes' names, in the order of a row's values.
          rows: Id -> its attributes: an int, or a tuple of ints for a list attribute.
          lines: Id -> the line it was read from.
        """
        ids = sorted(rows)
        columns: dict[str, IntColumn] = {}
        for place, name in enumerate(names):
            cells = [rows[key][place] for key in ids]
            if cells and isinstance(cells[0], tuple):
                lists = [cell for cell in cells if isinstance(cell, tuple)]
                splits = np.cumsum([0, *(len(cell) for cell in lists)], dtype=np.int64)
                columns[name] = np.array([value for cell in lists for value in cell], np.int64), splits
            else:
                columns[name] = np.array(cells, np.int64)
        return cls(np.array(ids, np.int64), np.array([lines[key] for key in ids], np.int64), columns)

    def id_set(self) -> Container[int]:
        """Return the ids as a set, for testing single ids."""
        return frozenset(self.ids.tolist())

    def take(self, ids: Ints) -> dict[str, IntColumn]:
        """Return the attributes of ``ids``, (M,) int64, known ids in any order: columns of M rows."""
        rows = np.searchsorted(self.ids, ids)
        return {
            name: gather_ragged(column, rows) if isinstance(column, tuple) else column[rows]
            for name, column in self.columns.items()
        }


# The lines that MeLU published.

PARTITIONS = ("warm", "user_cold", "item_cold", "both_cold")
"""MeLU's split: ratings of old users and movies; of new users; of new movies; of new users and movies."""

MELU_ITEM_NAMES = ("rate", "genre", "director", "actor")
MELU_USER_NAMES = ("gender", "age", "occupation", "zipcode")
MELU_ITEM_COLUMNS = ("year", *MELU_ITEM_NAMES, "writer")
MELU_HEADER = b"user,movie,rating,partition"

_MELU_UNKNOWN = {b"", b"N/A", b"nan"}
_PARENTHESES = re.compile(rb"\([^()]*\)")
_PARTITION_INDEX = {name.encode(): number for number, name in enumerate(PARTITIONS)}
_ZIPCODE = 5
_WRITERS = 7  # the place of the field

Vocabulary = Mapping[bytes, int]
Cells = tuple[int | tuple[int, ...], ...]


class PartitionedRating(NamedTuple):
    """A parsed line of the ratings file."""

    task: int
    item: int
    rating: float
    partition: int


def item_row_melu(fields: Sequence[bytes], vocabularies: Mapping[str, Vocabulary]) -> Cells:
    """Parse the attributes of a line of ``movies_extrainfos.dat``, in the order of `MELU_ITEM_COLUMNS`.

    Args:
      fields: id, title, year, rate, day of release, genres, directors, writers, actors, plot, poster; names
        of a list are separated by a comma and a space.
      vocabularies: One for each of `MELU_ITEM_NAMES`, and ``"writer"``.

    Raises:
      BadRecord: A name isn't in its vocabulary, or the year isn't a number.
    """
    year, rate, genres, directors, writers, actors = (fields[place] for place in (2, 3, 5, 6, _WRITERS, 8))
    return (
        parse_integer(year, "year"),
        _melu_number(rate, "rate", vocabularies),
        _melu_numbers(genres, "genre", vocabularies),
        _melu_numbers(_PARENTHESES.sub(b"", directors), "director", vocabularies),
        _melu_numbers(actors, "actor", vocabularies),
        _melu_numbers(_PARENTHESES.sub(b"", writers), "writer", vocabularies),
    )


def list_writers(movies: Iterable[Sequence[bytes]]) -> list[bytes]:
    """Make the list of writers from the fields of all movies, as `item_row_melu` takes them."""
    names = {
        name.strip() for fields in movies for name in _PARENTHESES.sub(b"", fields[_WRITERS]).split(b", ")
    }
    return [b"nan", *sorted(names - _MELU_UNKNOWN)]


def user_row_melu(fields: Sequence[bytes], vocabularies: Mapping[str, Vocabulary]) -> tuple[int, ...]:
    """Parse the attributes of a line of ``users.dat``, in the order of `MELU_USER_NAMES`.

    Args:
      fields: id, gender, age group, occupation's code, postal code.
      vocabularies: One for each of `MELU_USER_NAMES`.

    Raises:
      BadRecord: A value isn't in its vocabulary.
    """
    values = *fields[1:4], fields[4][:_ZIPCODE]
    return tuple(
        _melu_number(value, name, vocabularies) for name, value in zip(MELU_USER_NAMES, values, strict=True)
    )


def rating_row_melu(fields: Sequence[bytes]) -> PartitionedRating:
    """Parse a line of the ratings file: user, movie, rating, partition.

    Raises:
      BadRecord: A field isn't a number, the rating is out of range, or the partition isn't one of
        `PARTITIONS`.
    """
    user, movie, rating, partition = fields
    if partition not in _PARTITION_INDEX:
        raise BadRecord(
            Reason.UNKNOWN_CODE, f"partition must be one of {', '.join(PARTITIONS)}, got {show(partition)}"
        )
    return PartitionedRating(
        parse_integer(user, "user id"),
        parse_integer(movie, "movie id"),
        parse_rating(rating),
        _PARTITION_INDEX[partition],
    )


def _melu_numbers(names: bytes, kind: str, vocabularies: Mapping[str, Vocabulary]) -> tuple[int, ...]:
    return tuple(sorted({_melu_number(name.strip(), kind, vocabularies) for name in names.split(b", ")}))


def _melu_number(name: bytes, kind: str, vocabularies: Mapping[str, Vocabulary]) -> int:
    found = vocabularies[kind].get(b"nan" if name in _MELU_UNKNOWN else name)
    if found is None:
        raise BadRecord(Reason.UNKNOWN_CODE, f"{kind} {show(name)} isn't in m_{kind}.txt")
    return found
