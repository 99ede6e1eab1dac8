"""MovieLens as a source of ratings, parsed line by line and joined with the attributes of user and item.

With MeLU's published split, MovieLens-1M becomes four data sets of tasks, one for each partition
(`MeluSource`). A task is a user in one partition: the same user's ratings of old movies (``warm``) and of new
ones (``item_cold``) are two tasks. So each partition is prepared separately (`PlanConfig.partitions`). There
are no times: a task's rows are in the order of (movie, rating). Four pairs of user and movie occur twice;
they are kept, as in MeLU.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gmeta.preprocess.config import PlanConfig, Progress
from gmeta.preprocess.movielens.movielens_folder import FileForm, MovieLens
from gmeta.preprocess.movielens.movielens_records import (
    MELU_HEADER,
    MELU_ITEM_COLUMNS,
    MELU_USER_NAMES,
    PARTITIONS,
    parse_integer,
    parse_rating,
    rating_row_melu,
    show,
    split_fields,
)
from gmeta.preprocess.plan.texts import TextCollector
from gmeta.preprocess.source import NUMBER, BadRecord, BadRecords, Columns, Ints, Reason, Source
from gmeta.preprocess.table_spec import TEXTS_LIMIT, ColumnSpec, TableSpec

_INT, _FLOAT = ColumnSpec(dtype="int64", is_list=False), ColumnSpec(dtype="float32", is_list=False)
SPEC = TableSpec(
    task="task",
    time="timestamp",
    label="rating",
    unique=("item",),
    columns={
        "task": _INT,
        "item": _INT,
        "year": _INT,
        "genre": ColumnSpec(dtype="int64", is_list=True),
        "gender": _INT,
        "age": _INT,
        "occupation": _INT,
        "area": _INT,
        "rating": _FLOAT,
        "timestamp": _INT,
    },
)
"""The columns of the data set; `gmeta.preprocess.movielens.movielens_records` explains the numbers."""

DEFAULTS = PlanConfig(cold_modulus=5, min_rows=13, max_rows=100)
_RATING = np.dtype(
    [("task", "<i8"), ("item", "<i8"), ("rating", "<f4"), ("timestamp", "<i8"), ("line", "<i8")]
)
_LINES = 65_536  # lines of a chunk


class Rating(NamedTuple):
    """A parsed line of the ratings file."""

    task: int
    item: int
    rating: float
    timestamp: int


def map_rating(line: bytes, form: FileForm, users: Container[int], items: Container[int]) -> Rating:
    """Read one line of the ratings file.

    Args:
      line: ``user, item, rating, timestamp``, without the line's end.
      form: The file's form.
      users: The known users' ids.
      items: The known items' ids.

    Raises:
      BadRecord: There are too few or too many fields, a field isn't a number, the rating is out of range, or
        the user or the item has no attributes.
    """
    user_text, item_text, rating_text, time_text = split_fields(line, form.separator, form.fields)
    user = parse_integer(user_text, "user id")
    item = parse_integer(item_text, "item id")
    if user not in users:
        raise BadRecord(Reason.UNKNOWN_USER, f"user {show(user_text)} isn't in the users file")
    if item not in items:
        raise BadRecord(Reason.UNKNOWN_ITEM, f"item {show(item_text)} isn't in the items file")
    return Rating(user, item, parse_rating(rating_text), parse_integer(time_text, "timestamp"))


class MovieLensSource:
    """A `Source` of an opened folder.

    Args:
      folder: The folder.
      name: The source's name; None: that of its edition.
      texts_limit: As in `TableSpec`; texts are the items' titles.
    """

    spec, defaults = SPEC, DEFAULTS

    def __init__(
        self, folder: MovieLens, name: str | None = None, *, texts_limit: int | str = TEXTS_LIMIT
    ) -> None:
        self._folder = folder
        self._texts = TextCollector(replace(self.spec, texts_limit=texts_limit))
        self._texts.add_titles("item", folder.titles)
        self.name = name or folder.layout.name
        self.path = folder.ratings.path
        self.rows_read = 0

    def parts(self) -> Sequence[Source]:
        """Return the source itself."""
        return (self,)

    def digests(self) -> Mapping[str, str]:
        """Return file name -> SHA-256."""
        return self._folder.digests

    def start_digests(self) -> None:
        """Do nothing: the digests exist already."""

    def stamps(self) -> Mapping[str, Any]:
        """Return the digests."""
        return self._folder.digests

    def count(self) -> int:
        """Return the number of lines."""
        return self._folder.ratings.line_count

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the ratings with their attributes."""
        ratings, total = self._folder.ratings, self._folder.ratings.line_count
        users, items = self._folder.users.id_set(), self._folder.items.id_set()
        lines = ratings.lines()
        progress("read", 0, total)
        while part := list(itertools.islice(lines, _LINES)):
            mapped = []
            for number, line in part:
                try:
                    mapped.append((*map_rating(line, self._folder.layout.ratings, users, items), number))
                except BadRecord as error:
                    bad.add(error, ratings.path, number)
            self.rows_read += len(part)
            yield self._columns(np.array(mapped, _RATING))
            if part[-1][0] < total:
                progress("read", part[-1][0], total)
        progress("read", total, total)

    def _columns(self, ratings: np.ndarray[tuple[int], np.dtype[np.void]]) -> Columns:
        stored = {name: np.ascontiguousarray(ratings[name]) for name in ratings.dtype.names or ()}
        joined = {
            **self._folder.items.take(stored["item"]),
            **self._folder.users.take(stored["task"]),
            **stored,
        }
        return {**{name: joined[name] for name in self.spec.columns}, NUMBER: stored["line"]}

    def write_texts(self, folder: Path) -> Sequence[str]:
        """Write the items' titles."""
        return self._texts.write(folder)

    def where(self, number: int) -> tuple[Path, int | None, str]:
        """Return the line of the ratings file."""
        return self._folder.ratings.path, number, ""

    def check(self, tasks: Ints, bad: BadRecords) -> None:
        """Report users without ratings as bad."""
        users = self._folder.users
        absent = ~np.isin(users.ids, tasks)
        for user, line in zip(users.ids[absent].tolist(), users.lines[absent].tolist(), strict=True):
            message = f"user {user} has no rating in {self._folder.ratings.path.name}"
            bad.add(BadRecord(Reason.EMPTY_TASK, message), self._folder.users_path, line)

    def holds_rows(self, file: str) -> bool:
        """Return whether the file is the ratings file."""
        return file == self._folder.ratings.path.name


_LISTS = ("genre", "director", "actor", "writer")
MELU_SPEC = TableSpec(
    task="task",
    label="rating",
    columns={
        # Without a time, rows are sorted by the columns in this order.
        "task": ColumnSpec(dtype="int64", is_list=False),
        "item": ColumnSpec(dtype="int64", is_list=False),
        "rating": ColumnSpec(dtype="float32", is_list=False),
        **{
            name: ColumnSpec(dtype="int64", is_list=name in _LISTS)
            for name in (*MELU_ITEM_COLUMNS, *MELU_USER_NAMES)
        },
    },
)
"""The columns of the data set; `gmeta.preprocess.movielens.movielens_records` explains the numbers."""

MELU_DEFAULTS = PlanConfig(min_rows=13, max_rows=100, partitions=PARTITIONS)
_MELU_RATING = np.dtype(
    [("task", "<i8"), ("item", "<i8"), ("rating", "<f4"), ("partition", "<i8"), ("line", "<i8")]
)
_Ratings = np.ndarray[tuple[int], np.dtype[np.void]]


class MeluSource(MovieLensSource):
    """A `Source` of an opened folder whose ratings name their partition.

    Args:
      folder: The folder.
      partition: The number of the partition whose rows this source yields.
      whole: The source that this one is a part of; it reads the lines once for all parts.
      texts_limit: As in `TableSpec`.
    """

    spec, defaults = MELU_SPEC, MELU_DEFAULTS

    def __init__(
        self,
        folder: MovieLens,
        partition: int = 0,
        whole: MeluSource | None = None,
        *,
        texts_limit: int | str = TEXTS_LIMIT,
    ) -> None:
        super().__init__(folder, texts_limit=texts_limit)
        self._partition, self._whole = partition, whole or self
        self._ratings: _Ratings | None = None
        self._bad_lines = 0

    def parts(self) -> list[Source]:
        """Return one source for each partition."""
        return [MeluSource(self._folder, number, self) for number in range(len(PARTITIONS))]

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the partition's ratings with their attributes."""
        ratings = self._whole._parse(bad)
        own = ratings[ratings["partition"] == self._partition]
        progress("read", 0, len(own))
        self.rows_read = len(own) + (self._whole._bad_lines if self._partition == 0 else 0)
        yield self._columns(own)
        progress("read", len(own), len(own))

    def check(self, tasks: Ints, bad: BadRecords) -> None:
        """Do nothing: not every user has ratings in every partition."""

    def _parse(self, bad: BadRecords) -> _Ratings:
        """Return the ratings of all partitions; parse them at the first call."""
        if self._ratings is None:
            users, items = self._folder.users.id_set(), self._folder.items.id_set()
            file, form = self._folder.ratings, self._folder.layout.ratings
            rows: list[tuple[Any, ...]] = []
            for number, line in file.lines():
                if number == 1 and line == MELU_HEADER:
                    continue
                try:
                    row = rating_row_melu(split_fields(line, form.separator, form.fields))
                    if row.task not in users:
                        raise BadRecord(Reason.UNKNOWN_USER, f"user {row.task} isn't in the users file")
                    if row.item not in items:
                        raise BadRecord(Reason.UNKNOWN_ITEM, f"movie {row.item} isn't in the movies file")
                    rows.append((*row, number))
                except BadRecord as error:
                    self._bad_lines += 1
                    bad.add(error, file.path, number)
            self._ratings = np.array(rows, _MELU_RATING)
        return self._ratings
