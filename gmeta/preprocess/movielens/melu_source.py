"""MovieLens-1M with MeLU's published split as a source: four data sets of tasks, one for each partition.

A task is a user in one partition: the same user's ratings of old movies (``warm``) and of new ones
(``item_cold``) are two tasks. So each partition is prepared separately (`PlanConfig.partitions`). There are
no times: a task's rows are in the order of (movie, rating). Four pairs of user and movie occur twice; they
are kept, as in MeLU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gmeta.preprocess.columns import Columns, Ints
from gmeta.preprocess.config import PlanConfig, Progress
from gmeta.preprocess.movielens.melu_records import HEADER, ITEM_COLUMNS, PARTITIONS, USER_NAMES, rating_row
from gmeta.preprocess.movielens.movielens_folder import MovieLens
from gmeta.preprocess.movielens.movielens_records import split_fields
from gmeta.preprocess.movielens.movielens_source import MovieLensSource
from gmeta.preprocess.source import BadRecord, BadRecords, Reason, Source
from gmeta.preprocess.table_spec import TEXTS_LIMIT, ColumnSpec, TableSpec

_LISTS = ("genre", "director", "actor", "writer")
SPEC = TableSpec(
    task="task",
    label="rating",
    columns={
        # Without a time, rows are sorted by the columns in this order.
        "task": ColumnSpec(dtype="int64", is_list=False),
        "item": ColumnSpec(dtype="int64", is_list=False),
        "rating": ColumnSpec(dtype="float32", is_list=False),
        **{name: ColumnSpec(dtype="int64", is_list=name in _LISTS) for name in (*ITEM_COLUMNS, *USER_NAMES)},
    },
)
"""The columns of the data set; `gmeta.preprocess.movielens.melu_records` explains the numbers."""

DEFAULTS = PlanConfig(min_rows=13, max_rows=100, partitions=PARTITIONS)
_RATING = np.dtype(
    [("task", "<i8"), ("item", "<i8"), ("rating", "<f4"), ("partition", "<i8"), ("line", "<i8")]
)
_Ratings = np.ndarray[tuple[int], np.dtype[np.void]]


class MeluSource(MovieLensSource):
    """A `Source` of an opened folder whose ratings name their partition.

    Args:
      folder: The folder.
      partition: The number of the partition whose rows this source has.
      whole: The source that this one is a part of; it reads the lines once for all parts.
      texts_limit: As in `TableSpec`.
    """

    spec, defaults = SPEC, DEFAULTS

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
                if number == 1 and line == HEADER:
                    continue
                try:
                    row = rating_row(split_fields(line, form.separator, form.fields))
                    if row.task not in users:
                        raise BadRecord(Reason.UNKNOWN_USER, f"user {row.task} isn't in the users file")
                    if row.item not in items:
                        raise BadRecord(Reason.UNKNOWN_ITEM, f"movie {row.item} isn't in the movies file")
                    rows.append((*row, number))
                except BadRecord as error:
                    self._bad_lines += 1
                    bad.add(error, file.path, number)
            self._ratings = np.array(rows, _RATING)
        return self._ratings
