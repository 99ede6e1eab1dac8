"""Parsing of MovieLens-1M as MeLU published it, and the mapping of names to numbers.

MeLU (Lee et al., KDD 2019) adds to MovieLens-1M data on each movie from a film encyclopaedia, a list of
every name (``m_actor.txt`` and seven more), and a split of the ratings by new and old users and movies. A
name's number is its line in its list, from 0, as in MeLU's own code. The functions are pure functions of the
bytes of a line; they raise `BadRecord` and don't know the file.

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

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gmeta.preprocess.movielens.movielens_records import parse_integer, parse_rating, show
from gmeta.preprocess.source import BadRecord, Reason

PARTITIONS = ("warm", "user_cold", "item_cold", "both_cold")
"""MeLU's split: ratings of old users and movies; of new users; of new movies; of new users and movies."""

ITEM_NAMES = ("rate", "genre", "director", "actor")
USER_NAMES = ("gender", "age", "occupation", "zipcode")
ITEM_COLUMNS = ("year", *ITEM_NAMES, "writer")
HEADER = b"user,movie,rating,partition"

_UNKNOWN = {b"", b"N/A", b"nan"}
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


def item_row(fields: Sequence[bytes], vocabularies: Mapping[str, Vocabulary]) -> Cells:
    """Parse the attributes of a line of ``movies_extrainfos.dat``, in the order of `ITEM_COLUMNS`.

    Args:
      fields: id, title, year, rate, day of release, genres, directors, writers, actors, plot, poster; names
        of a list are separated by a comma and a space.
      vocabularies: One for each of `ITEM_NAMES`, and ``"writer"``.

    Raises:
      BadRecord: A name isn't in its vocabulary, or the year isn't a number.
    """
    year, rate, genres, directors, writers, actors = (fields[place] for place in (2, 3, 5, 6, _WRITERS, 8))
    return (
        parse_integer(year, "year"),
        _number(rate, "rate", vocabularies),
        _numbers(genres, "genre", vocabularies),
        _numbers(_PARENTHESES.sub(b"", directors), "director", vocabularies),
        _numbers(actors, "actor", vocabularies),
        _numbers(_PARENTHESES.sub(b"", writers), "writer", vocabularies),
    )


def list_writers(movies: Iterable[Sequence[bytes]]) -> list[bytes]:
    """Make the list of writers from the fields of all movies, as `item_row` takes them."""
    names = {
        name.strip() for fields in movies for name in _PARENTHESES.sub(b"", fields[_WRITERS]).split(b", ")
    }
    return [b"nan", *sorted(names - _UNKNOWN)]


def user_row(fields: Sequence[bytes], vocabularies: Mapping[str, Vocabulary]) -> tuple[int, ...]:
    """Parse the attributes of a line of ``users.dat``, in the order of `USER_NAMES`.

    Args:
      fields: id, gender, age group, occupation's code, postal code.
      vocabularies: One for each of `USER_NAMES`.

    Raises:
      BadRecord: A value isn't in its vocabulary.
    """
    values = *fields[1:4], fields[4][:_ZIPCODE]
    return tuple(_number(value, name, vocabularies) for name, value in zip(USER_NAMES, values, strict=True))


def rating_row(fields: Sequence[bytes]) -> PartitionedRating:
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


def _numbers(names: bytes, kind: str, vocabularies: Mapping[str, Vocabulary]) -> tuple[int, ...]:
    return tuple(sorted({_number(name.strip(), kind, vocabularies) for name in names.split(b", ")}))


def _number(name: bytes, kind: str, vocabularies: Mapping[str, Vocabulary]) -> int:
    found = vocabularies[kind].get(b"nan" if name in _UNKNOWN else name)
    if found is None:
        raise BadRecord(Reason.UNKNOWN_CODE, f"{kind} {show(name)} isn't in m_{kind}.txt")
    return found
