"""MovieLens folders: their layout, users, items and ratings file.

The name of the ratings file identifies the layout: ``u.data`` is MovieLens-100K's, ``ratings.dat``
MovieLens-1M's, and ``ratings.csv.gz`` that of MovieLens-1M with MeLU's split. Users and
items are small and are read completely into an `AttributeTable`; ratings remain lines for an engine to map.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gmeta.core.errors import DataError
from gmeta.preprocess.movielens.movielens_records import (
    GENRES,
    ITEM_COLUMNS,
    MELU_ITEM_COLUMNS,
    MELU_ITEM_NAMES,
    MELU_USER_NAMES,
    USER_COLUMNS,
    AttributeTable,
    Cells,
    RawFile,
    item_row_1m,
    item_row_100k,
    item_row_melu,
    list_writers,
    parse_integer,
    show,
    split_fields,
    user_row_1m,
    user_row_100k,
    user_row_melu,
)
from gmeta.preprocess.shape_spec import Join
from gmeta.preprocess.source import BadRecord, BadRecords, Reason
from gmeta.preprocess.table_spec import GAPS, TableSpec
from gmeta.preprocess.tables.recognition import open_text

RATING_FIELDS = 4  # user, item, rating, timestamp: the same in both layouts
_MOST_NAMES = 12  # a message is one line


@dataclass(frozen=True)
class FileForm:
    """The name of a file, the separator of its fields, and their number."""

    name: str
    separator: bytes
    fields: int


@dataclass(frozen=True)
class Layout:
    """The files of one edition of MovieLens.

    Attributes:
      name: The edition's name in messages and manifests.
      ratings: ``user, item, rating`` and a timestamp or, with MeLU's split, the partition.
      users: One line for each user, with the id first.
      items: One line for each item, with the id first.
      occupations: The file that names the occupations, one on each line; None if users have a code.
    """

    name: str
    ratings: FileForm
    users: FileForm
    items: FileForm
    occupations: str | None


ML_100K = Layout(
    "ml-100k",
    ratings=FileForm("u.data", b"\t", RATING_FIELDS),
    users=FileForm("u.user", b"|", 5),
    items=FileForm("u.item", b"|", 5 + len(GENRES)),
    occupations="u.occupation",
)
ML_1M = Layout(
    "ml-1m",
    ratings=FileForm("ratings.dat", b"::", RATING_FIELDS),
    users=FileForm("users.dat", b"::", 5),
    items=FileForm("movies.dat", b"::", 3),
    occupations=None,
)
ML_1M_MELU = Layout(
    "ml-1m-melu",
    ratings=FileForm("ratings.csv.gz", b",", 4),  # user, movie, rating, partition
    users=FileForm("users.dat", b"::", 5),
    items=FileForm("movies_extrainfos.dat", b"::", 11),
    occupations=None,
)
LAYOUTS = (ML_100K, ML_1M, ML_1M_MELU)


@dataclass(frozen=True)
class MovieLens:
    """An opened folder.

    Attributes:
      layout: The edition.
      users: Attributes by user id: ``gender``, ``age``, ``occupation``, ``area``.
      items: Attributes by item id: ``year`` and the list ``genre``.
      users_path: The file that ``users`` was read from, for messages.
      ratings: The ratings file.
      titles: Item id -> its title.
      digests: File name -> SHA-256, of every file that was read.
    """

    layout: Layout
    users: AttributeTable
    items: AttributeTable
    users_path: Path
    ratings: RawFile
    titles: Mapping[int, str]
    digests: Mapping[str, str]


_TABLES = {
    "u.data": (("u.item", "item"), ("u.user", "user")),
    "ratings.dat": (("movies.dat", "item"), ("users.dat", "user")),
    "ratings.csv": (("movies.csv", "movieId"),),
}
"""The ratings of an edition, and its side tables with their keys."""


def is_table(folder: Path) -> bool:
    """Return whether `as_table` reads a folder: of MovieLens-10M, -32M or the like, or of RecBole."""
    is_new = (folder / "ratings.csv").is_file()
    is_old = (folder / "ratings.dat").is_file() and not (folder / "users.dat").is_file()
    return is_new or is_old or _interactions(folder) is not None


def as_table(
    data: Sequence[str | os.PathLike[str]], spec: TableSpec
) -> tuple[Sequence[str | os.PathLike[str]], TableSpec]:
    """Return the rows of a folder as a table, with side tables joined; return other data unchanged.

    The rows are MovieLens' ratings, or RecBole's ``.inter``. Attributes that an item or a user lacks become
    separate values, unless the spec sets another rule.
    """
    folder = Path(data[0])
    if len(data) != 1:
        return data, spec
    if rows := next((folder / name for name in _TABLES if (folder / name).is_file()), None):
        sides = [(folder / file, on) for file, on in _TABLES[rows.name]]
    elif rows := _interactions(folder):
        sides = [(rows.with_suffix(ending), _first_name(rows.with_suffix(ending))) for ending in _SIDES]
    else:
        return data, spec
    joins = tuple(Join(str(file), on) for file, on in sides if file.is_file())
    shape = replace(spec.shape, joins=(*joins, *spec.shape.joins))
    return [rows], replace(spec, shape=shape, defaults=spec.defaults or (GAPS,))


_SIDES = (".item", ".user")
"""The side tables of RecBole's atomic files, whose first column is the key."""


def _interactions(folder: Path) -> Path | None:
    """Return the interactions of a folder of RecBole's atomic files; None if it has none, or several."""
    found = sorted(folder.glob("*.inter")) if folder.is_dir() else []
    return found[0] if len(found) == 1 else None


def _first_name(file: Path) -> str:
    """Return the name of the first column of one of RecBole's atomic files, without its type."""
    if not file.is_file():
        return ""
    with open_text(file) as stream:
        return stream.readline().split("\t")[0].partition(":")[0].strip()


def detect(folder: Path) -> Layout:
    """Return the layout of a folder, by its ratings file.

    Raises:
      DataError: The folder can't be listed, or has no ratings file or more than one. The error lists what was
        sought and found.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise DataError(f"can't list the folder: {error.strerror}", path=folder) from error
    found = [layout for layout in LAYOUTS if layout.ratings.name in names]
    if len(found) == 1:
        return found[0]
    layouts = [f"{layout.ratings.name} ({layout.name})" for layout in found or LAYOUTS]
    if found:
        raise DataError(f"holds both {' and '.join(layouts)}", path=folder, advice="keep one of them")
    sought = " or ".join(layouts)
    shown = ", ".join(names[:_MOST_NAMES]) or "nothing"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    inside = _first_inside(folder, names)
    raise DataError(
        f"not a MovieLens folder: looked for {sought}, found {shown}{more}",
        path=folder,
        advice=f"did you mean {inside}?" if inside else None,
    )


def _first_inside(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first subfolder with a ratings file; None if there is none, or access is denied."""
    with suppress(OSError):
        for name in names:
            if any((folder / name / layout.ratings.name).exists() for layout in LAYOUTS):
                return folder / name
    return None


def open_folder(folder: Path, bad: BadRecords) -> MovieLens:
    """Detect a folder's layout and `load` it.

    Raises:
      DataError: As for `detect` and `load`.
    """
    return load(detect(folder), lambda name: RawFile.read(folder / name), bad)


def load(layout: Layout, read: Callable[[str], RawFile], bad: BadRecords) -> MovieLens:
    """Read users and items into tables, and the ratings as bytes.

    Under ``"skip"``, a user or an item whose line is bad is left out. Its ratings then have an unknown id and
    are left out too.

    Args:
      layout: The layout, which names the files.
      read: File name -> the file.
      bad: Applies the rule for bad lines.

    Raises:
      DataError: ``read`` finds a file missing or empty, or a line is bad and the rule is ``"raise"``.
    """
    ratings, users, items = (read(form.name) for form in (layout.ratings, layout.users, layout.items))
    files = [ratings, users, items]
    names: tuple[Sequence[str], Sequence[str]] = USER_COLUMNS, ITEM_COLUMNS
    user_row: Callable[[Sequence[bytes]], Cells] = user_row_1m
    item_row: Callable[[Sequence[bytes]], Cells] = item_row_1m
    if layout.occupations is not None:
        occupation_file = read(layout.occupations)
        files.append(occupation_file)
        occupations = {name: index for index, (_, name) in enumerate(occupation_file.lines())}
        user_row, item_row = (lambda fields: user_row_100k(fields, occupations)), item_row_100k
    if layout is ML_1M_MELU:
        names = MELU_USER_NAMES, MELU_ITEM_COLUMNS
        lists = {name: read(f"m_{name}.txt") for name in (*names[0], *MELU_ITEM_NAMES)}
        files += lists.values()
        known = {name: _number(line for _, line in file.lines()) for name, file in lists.items()}
        known["writer"] = _number(list_writers(_whole_rows(items, layout.items)))
        user_row, item_row = (
            partial(user_row_melu, vocabularies=known),
            partial(item_row_melu, vocabularies=known),
        )
    table = _table(items, layout.items, names[1], item_row, bad)
    return MovieLens(
        layout,
        users=_table(users, layout.users, names[0], user_row, bad),
        items=table,
        users_path=users.path,
        ratings=ratings,
        titles=_titles(items, layout.items, table.id_set()),
        digests={file.path.name: file.sha256 for file in files},
    )


def _whole_rows(file: RawFile, form: FileForm) -> Iterator[list[bytes]]:
    """Yield the fields of each line that has the required number; `_table` reports the others."""
    for _, line in file.lines():
        with suppress(BadRecord):
            yield split_fields(line, form.separator, form.fields)


def _titles(file: RawFile, form: FileForm, ids: Container[int]) -> dict[int, str]:
    """Return the titles of items that have one; they are UTF-8, or ISO 8859-1 as published."""
    found: dict[int, str] = {}
    for number, title, *_ in _whole_rows(file, form):
        if title.strip() and number.isdigit() and int(number) in ids:
            try:
                text = title.decode()
            except UnicodeDecodeError:
                text = title.decode("latin-1")
            found.setdefault(int(number), text.strip())
    return found


def _number(lines: Iterable[bytes]) -> dict[bytes, int]:
    """Map each line to its place among the lines; a repeated line maps to its first place."""
    found: dict[bytes, int] = {}
    for place, line in enumerate(lines):
        found.setdefault(line.strip(), place)
    return found


def _table(
    file: RawFile,
    form: FileForm,
    names: Sequence[str],
    parse_row: Callable[[Sequence[bytes]], Cells],
    bad: BadRecords,
) -> AttributeTable:
    rows: dict[int, Cells] = {}
    lines: dict[int, int] = {}
    for number, line in file.lines():
        try:
            fields = split_fields(line, form.separator, form.fields)
            key = parse_integer(fields[0], "id")
            if key in rows:
                raise BadRecord(
                    Reason.REPEATED_ID, f"id {show(fields[0])} stands on line {lines[key]} already"
                )
            rows[key], lines[key] = parse_row(fields), number
        except BadRecord as error:
            bad.add(error, file.path, number)
    return AttributeTable.build(names, rows, lines)
