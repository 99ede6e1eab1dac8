"""Columns of users and of items, such as an age or genres, as features of the two towers.

A column is one of users if it hardly changes among a user's rows, compared to rows of any two users; likewise
for items. Each of its values gets a number, and the numbers of all columns of a user or an item are one
feature, whose embedding is their sum. So a new user or item with columns has a vector that training has
learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.schema import OnBad
from gmeta.experiment.baselines.attributes import belongs, values_of
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.plan.next_item_config import ChosenColumns
from gmeta.experiment.ranking.drawn_data import read_rows
from gmeta.experiment.ranking.examples import GAP
from gmeta.preprocess.source import Columns, Ragged, gather_ragged

BINS = 10
"""Numbers are divided into so many bins, with as many users, or items, in each."""
_COUNTED = 20  # more distinct whole numbers may be quantities, so they get bins too
_SHARED = 0.5  # the share of users, or items, whose value another one has; with fewer, a column is a name


@dataclass(frozen=True)
class Described:
    """The columns of users, or of items.

    Attributes:
      ids: (n,) ids, ascending.
      columns: Column -> the numbers of each id's values, from 0: (values,) and splits (n + 1,).
    """

    ids: Ints
    columns: Mapping[str, Ragged]

    def choose(self, names: Sequence[str], asked: Ints) -> Ragged:
        """Return the numbers of all values of some columns, (values,) and splits (asked + 1,).

        Args:
          names: The columns; the numbers of a column follow those of the one before.
          asked: (asked,) ids; an unknown id has no value.
        """
        known, owners, numbers, begin = len(self.ids), [], [], 0
        for name in names:
            values, splits = self.columns[name]
            owners.append(np.repeat(np.arange(known), np.diff(splits)))
            numbers.append(values + begin)
            begin += int(values.max(initial=-1)) + 1
        owner = np.concatenate([np.zeros(0, np.int64), *owners])
        order = np.argsort(owner, kind="stable")
        every = np.concatenate([np.zeros(0, np.int64), *numbers])[order]
        splits = np.searchsorted(owner[order], np.arange(known + 2)).astype(np.int64)  # the last one is empty
        place = np.minimum(np.searchsorted(self.ids, asked), max(known - 1, 0))
        there = self.ids[place] == asked if known else np.zeros(len(asked), np.bool_)
        return gather_ragged((every, splits), np.where(there, place, known))


@dataclass(frozen=True)
class SideColumns:
    """The columns of users and of items in a data set.

    Attributes:
      users: The columns of users.
      items: The columns of items.
    """

    users: Described
    items: Described

    @classmethod
    def read(cls, data: Path, item: str, on_bad: OnBad = "raise") -> SideColumns:
        """Find the columns of a prepared data set, and their values.

        Args:
          data: The data set, whose tasks are users.
          item: The column of items.
          on_bad: What a bad record does: ``"raise"`` or ``"skip"``.

        Raises:
          DataError: The data set can't be read.
        """
        manifest = Manifest.load(data)
        schema, roles = manifest.schema, manifest.roles
        apart = {schema.task, schema.batch, item, roles.time, roles.label, "timestamp"}
        names = [
            each.name
            for each in schema
            if each.name not in apart and not (each.is_list and each.dtype == "float32")
        ]
        columns = read_rows(data, [schema.task, item, *names], on_bad)
        found = []
        for owner in (schema.task, item):
            ids, first, again = np.unique(np.asarray(columns[owner]), return_index=True, return_inverse=True)
            own = {name: columns[name] for name in names if belongs(columns[name], first[again])}
            names = [name for name in names if name not in own]
            found.append(Described(ids, _numbered(own, first, roles.hashed)))
        return cls(*found)

    def names(self, chosen: ChosenColumns) -> tuple[list[str], list[str]]:
        """Return the columns of users and of items that a setting chooses.

        Raises:
          ConfigError: The setting names a column that is neither.
        """
        every = [*self.users.columns], [*self.items.columns]
        if isinstance(chosen, bool):
            return every if chosen else ([], [])
        if unknown := [name for name in chosen if name not in every[0] + every[1]]:
            shown = [", ".join(names) or "none" for names in every]
            raise ConfigError(
                f"columns names {', '.join(unknown)}, which aren't the same in all rows of a user or of an "
                f"item, or say nothing; those of users are {shown[0]}, those of items {shown[1]}"
            )
        of_users, of_items = every
        return [name for name in of_users if name in chosen], [name for name in of_items if name in chosen]


def as_tensor(column: Ragged) -> tf.RaggedTensor:
    """Return lists as a ragged tensor."""
    return tf.RaggedTensor.from_row_splits(tf.constant(column[0], tf.int64), column[1])


def _numbered(columns: Columns, rows: Ints, hashed: Sequence[str]) -> dict[str, Ragged]:
    """Number the values of each owner's row, and leave out those that only one owner has."""
    found = {}
    for name, values in columns.items():
        own = gather_ragged(values, rows) if isinstance(values, tuple) else values[rows]
        flat, counts = values_of(own)
        owner = np.repeat(np.arange(len(rows)), counts)
        kinds = []
        numeric = flat.dtype == np.float32 or name not in hashed
        if flat.dtype != np.float32:
            kinds.append((owner, np.unique(flat, return_inverse=True)[1]))
            numeric &= len(np.unique(flat)) > _COUNTED and not isinstance(own, tuple)
        if numeric:
            there = np.isfinite(flat) & (flat > GAP)
            given = flat[there].astype(np.float64)
            edges = np.unique(np.quantile(given, np.arange(1, BINS) / BINS)) if len(given) else given
            begin = 1 + max((int(numbers.max(initial=-1)) for _, numbers in kinds), default=-1)
            kinds.append((owner[there], begin + np.searchsorted(edges, given, side="right")))
        owner, numbers = (np.concatenate(each) for each in zip(*kinds, strict=True))
        column = _shared(owner, numbers, len(rows))
        if column is not None and len(set(column[0])) > 1:
            found[name] = _ones(column) if np.isin(flat, (0, 1)).all() and not numeric else column
    return found


def _ones(column: Ragged) -> Ragged:
    """Leave out the zeros of a column of 0 and 1, such as that of a genre: only 1 is informative."""
    values, splits = column
    before = np.concatenate([[0], np.cumsum(values)])
    return np.zeros(before[-1], np.int64), before[splits]


def _shared(owner: Ints, numbers: Ints, size: int) -> Ragged | None:
    """Return each owner's numbers that others have too, renumbered; None if few owners have any."""
    pairs = np.unique(np.stack([owner, numbers]), axis=1)
    kept = np.bincount(pairs[1])[pairs[1]] > 1
    owner, numbers = pairs[:, kept]
    if len(np.unique(owner)) < _SHARED * size:
        return None
    splits = np.searchsorted(owner, np.arange(size + 1)).astype(np.int64)
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64), splits
