"""MovieLens as histories: what each user rated, in the order of time, with the last two items held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from gmeta.core.errors import DataError
from gmeta.preprocess.config import no_progress
from gmeta.preprocess.movielens.movielens_folder import ML_1M_MELU, open_folder
from gmeta.preprocess.movielens.movielens_source import MovieLensSource
from gmeta.preprocess.source import BadRecords

Histories = Mapping[str, tf.RaggedTensor]

FEWEST = 3  # ratings of a user: one to look back at, one to choose by, one to test


@dataclass(frozen=True)
class LeaveLastOut:
    """Three cuts of the same histories; what is told is each one's last item.

    Attributes:
      name: The edition's.
      items: How many items the catalogue has; ids are from 0.
      train: Histories without their last two items; every item is to be told from those before it.
      validation: Histories up to the second last item.
      test: Whole histories.
    """

    name: str
    items: int
    train: Histories
    validation: Histories
    test: Histories

    @property
    def users(self) -> int:
        """How many."""
        return int(self.test["item"].nrows())


def read_histories(folder: Path) -> LeaveLastOut:
    """Read a MovieLens-100K or -1M folder as GroupLens publishes them.

    Half of MovieLens-100K's ratings have the second of the rating before. Those stay in the file's order,
    which knows nothing of the items; in the order of ids, a model could learn that the next id is larger.

    Raises:
      DataError: It is no such folder, a line is malformed, or no user has `FEWEST` ratings.
    """
    bad = BadRecords("raise")
    movielens = open_folder(folder, bad)
    if movielens.layout is ML_1M_MELU:
        raise DataError(
            "MeLU's split of MovieLens-1M has no timestamps",
            path=movielens.ratings.path,
            advice="give the folder that GroupLens publishes, with ratings.dat",
        )
    chunks = list(MovieLensSource(movielens).chunks(bad, no_progress))
    users, items, times = (
        np.concatenate([np.asarray(chunk[column]) for chunk in chunks])
        for column in ("task", "item", "timestamp")
    )
    order = np.lexsort((times, users))  # stable: the file's order where both are the same
    users, times = users[order], times[order]
    items = np.searchsorted(np.asarray(movielens.items.ids), items[order])
    _, counts = np.unique(users, return_counts=True)
    kept = np.repeat(counts >= FEWEST, counts)
    counts = counts[counts >= FEWEST]
    if not len(counts):
        raise DataError(f"no user has {FEWEST} ratings", path=movielens.ratings.path)
    whole = {
        name: tf.RaggedTensor.from_row_lengths(tf.constant(column[kept], tf.int64), counts)
        for name, column in (("item", items), ("time", times))
    }
    train, validation = ({name: rows[:, :-held] for name, rows in whole.items()} for held in (2, 1))
    return LeaveLastOut(movielens.layout.name, len(movielens.items.ids), train, validation, whole)


def batches(histories: Histories, size: int, *, shuffle: int | None = None) -> tf.data.Dataset:
    """Batches of users, in the same order each time, or in another one each epoch by a seed."""
    data = tf.data.Dataset.from_tensor_slices(dict(histories))
    if shuffle is not None:
        data = data.shuffle(int(histories["item"].nrows()), seed=shuffle)
    return data.batch(size).prefetch(2)
