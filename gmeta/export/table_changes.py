"""Finds the rows that have changed since the last publication, and brings all ranks' rows to rank 0.

Each rank exports its own rows. They are sent to rank 0 alone, in pieces of `PIECE` bytes of all ranks
together, so the other ranks never hold the rows of others. Ranks own ascending runs of logical shards, and
an export is sorted by shard and key; hence what rank 0 receives is in the order of a single process. Of
several groups of ranks (`gmeta.init`), the first one sends, because the others have copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.rank_group import Ranks
from gmeta.core.errors import NotFiniteError
from gmeta.core.row_formats import RowDtype, RowFormat
from gmeta.core.shares import LOGICAL_SHARDS
from gmeta.export.delta_signatures import named_tables, tables_of
from gmeta.export.model_deltas import Ints, TableChange
from gmeta.ops import HashTable

Array = npt.NDArray[Any]

PIECE = 64 << 20
"""About how many bytes all ranks send at once, and how many bytes of rows are exported at once."""
_SHARDS_AT_A_TIME = 16
_NO_IDS: Ints = np.empty(0, np.int64)


@dataclass(frozen=True)
class Found:
    """The changes of this rank's rows.

    Attributes:
      steps: Table -> its step when they were read.
      by_table: Table -> its changes, by keys.
      by_user: User's table -> its changes, by ids, with rows in the stream's format.
    """

    steps: Mapping[str, int]
    by_table: Mapping[str, TableChange]
    by_user: Mapping[str, TableChange]


class Changes:
    """What has changed in a model's tables since the last publication.

    Rows whose last step isn't below the table's step at the last publication are found again. Removed ids
    come from the tables' journals, which checkpoints empty too.

    Args:
      model: The model, which is built before the first call of a method.
      ranks: The ranks.
      limit: About how many removed keys the journal of a table records.
      dtype: The dtype of rows in the stream.

    Attributes:
      whole: Whether `find` finds all changes since the last publication, on this rank.
    """

    def __init__(self, model: tf.keras.Model, ranks: Ranks, limit: int, dtype: RowDtype) -> None:
        self.limit, self.whole = limit, False
        self._model, self._ranks, self._dtype = model, ranks, dtype
        self._since: dict[str, int] = {}  # table -> its step at the last publication
        self._removed: dict[str, list[Ints]] = {}  # keys that its journal has returned since then
        self._absent: dict[str, Ints] = {}  # removed keys in its journal that servers already have
        self._own_journals: set[str] = set()  # tables whose journal this object started, not a checkpoint

    @cached_property
    def tables(self) -> list[HashTable]:
        """The model's tables, sorted by name."""
        return tables_of(self._model)

    @property
    def _own(self) -> list[HashTable]:
        """The tables whose rows this rank sends."""
        return self.tables if self._ranks.writes else []

    def can_continue(self) -> bool:
        """Return whether this rank's changes since the last publication are known."""
        return self.whole and all(bool(table.journal_whole()) for table in self._own)

    def start(self) -> dict[str, int]:
        """Make the journals record removals, unless a checkpoint already does; return the tables' steps."""
        for table in self._own:
            table.removal_readers.add(self)
            if not bool(table.journal_whole()):
                table.start_journal(self.limit)
                self._own_journals.add(table.name)
        return {table.name: int(table.step()) for table in self._own}

    def all_published(self, steps: Mapping[str, int]) -> None:
        """Note that all rows were published, at or after the steps that `start` returned."""
        for name, step in steps.items():
            self._since[name], self._removed[name], self._absent[name] = step, [], _NO_IDS
        self.whole = True

    def find(self) -> Found:
        """Find what has changed in this rank's rows.

        Raises:
          NotFiniteError: A row holds NaN or infinity.
        """
        steps = {table.name: int(table.step()) for table in self._own}
        found = {table.name: self._of(table) for table in self._own}
        none = {table.name: no_changes(table) for table in self.tables}
        return Found(steps, found, self.by_user({**none, **found}))

    def _of(self, table: HashTable) -> TableChange:
        keys, rows = [], []
        for first in range(0, LOGICAL_SHARDS, _SHARDS_AT_A_TIME):
            part = table.export_shards(first, first + _SHARDS_AT_A_TIME, self._since[table.name])
            keys.append(np.asarray(part.keys))
            rows.append(np.asarray(part.rows))
        removed = np.concatenate([_NO_IDS, *self._removed[table.name]])  # by these exports, and by others
        gone = np.setdiff1d(removed, self._absent[table.name])
        if len(gone):
            gone = gone[~table.contains(tf.constant(gone)).numpy()]
        return TableChange(np.concatenate(keys), np.concatenate(rows), gone)

    def published(self, found: Found) -> None:
        """Note that the changes which `find` returned were published."""
        for table in self._own:
            name, change = table.name, found.by_table[table.name]
            self._since[name], self._removed[name] = found.steps[name], []
            if name not in self._own_journals:  # the journal has these keys until the next checkpoint
                absent = np.union1d(self._absent[name], change.removed)
                self._absent[name] = np.setdiff1d(absent, change.ids)
            else:
                table.forget_removals()

    def may_be_published(self, found: Found) -> None:
        """Note that servers may have the changes which `find` returned: the next delta includes them."""
        for name, change in found.by_table.items():  # if it is removed again, servers must remove it too
            self._absent[name] = np.setdiff1d(self._absent[name], change.ids)

    def by_user(self, changes: Mapping[str, TableChange]) -> dict[str, TableChange]:
        """Return the changes of some physical tables by users' tables, with rows in the stream's format.

        Raises:
          NotFiniteError: A row holds NaN or infinity.
        """
        found = {
            name: _own(named, changes[named.physical])
            for name, named in named_tables(self._model).items()
            if named.physical in changes
        }
        _check_finite(found)
        return {
            name: replace(change, rows=RowFormat(self._dtype, change.rows.shape[1]).encode(change.rows))
            for name, change in found.items()
        }

    # A table calls these.

    def note_removals(self, table: HashTable, keys: Ints) -> None:
        """Store removed keys that a table's journal has returned, to a checkpoint or to this object."""
        if len(keys) and table.name in self._removed:
            self._removed[table.name].append(keys)

    def journal_emptied(self, table: HashTable, *, lost: bool, by_checkpoint: bool) -> None:
        """Note that a table's journal won't return earlier keys again."""
        if by_checkpoint:
            self._own_journals.discard(table.name)
        if lost:  # for example by a restore: the next publication is a SavedModel
            self.whole = False
        self._absent[table.name] = _NO_IDS


def no_changes(table: HashTable) -> TableChange:
    """Return that nothing has changed in a table."""
    return TableChange(_NO_IDS, np.empty((0, table.dim), np.float32), _NO_IDS)


def _own(named: Any, change: TableChange) -> TableChange:
    """Return the changes of a physical table that belong to a user's table, with that table's ids."""
    rows = named.own({"keys": change.ids, "rows": change.rows})
    removed = named.own({"keys": change.removed})
    return TableChange(rows["keys"], rows["rows"], removed["keys"])


def _check_finite(tables: Mapping[str, TableChange]) -> None:
    for name, change in tables.items():
        bad = ~np.isfinite(change.rows).all(axis=1)
        if bad.any():
            raise NotFiniteError(
                f"table {name!r}: the rows of ids {change.ids[bad][:5].tolist()} hold NaN or infinity: "
                "training has diverged, and nothing is published. Train with a lower rate from an earlier "
                "checkpoint"
            )


# Brings rows to rank 0. All ranks call these functions together.


def on_first(columns: Sequence[Array]) -> list[Array]:
    """Return the rows of all ranks on rank 0, those of lower ranks first; none on the others.

    Args:
      columns: Arrays with equally many rows. Other dimensions and dtypes are the same on all ranks.
    """
    here = collectives.world()
    if here.size == 1:
        return [*columns]
    counts = collectives.allgather_objects(len(columns[0]))
    bytes_of_row = sum(column.itemsize * int(np.prod(column.shape[1:])) for column in columns)
    step = max(1, PIECE // here.size // bytes_of_row)
    total = sum(counts) if here.rank == 0 else 0
    found = [np.empty((total, *column.shape[1:]), column.dtype) for column in columns]
    places = np.cumsum([0, *counts])[:-1]  # where the next rows of each rank belong
    for begin in range(0, max(counts), step):
        sizes = np.zeros(here.size, np.int64)
        for column, whole in zip(columns, found, strict=True):
            received, came = _send(column[begin : begin + step])
            ends = np.cumsum(came)
            for rank in range(here.size if here.rank == 0 else 0):
                part = received[ends[rank] - came[rank] : ends[rank]]
                whole[places[rank] : places[rank] + came[rank]] = part
            sizes = came
        places = places + sizes
    return found


def _send(rows: Array) -> tuple[Array, Ints]:
    """Send rows to rank 0; return what was received, and how many rows came from each rank."""
    splits = np.zeros(collectives.world().size, np.int32)
    splits[0] = len(rows)
    with tf.device("CPU:0"):
        received, came = collectives.alltoall(tf.constant(rows), tf.constant(splits), name="publish/rows")
    return received.numpy(), came.numpy().astype(np.int64)


def changes_on_first(changes: Mapping[str, TableChange]) -> dict[str, TableChange]:
    """Return all ranks' changes on rank 0, and empty ones on the others.

    Args:
      changes: Table -> this rank's changes; all ranks name the same tables in the same order.
    """
    found = {}
    for name, change in changes.items():
        ids, rows = on_first([change.ids, change.rows])
        (removed,) = on_first([change.removed])
        found[name] = TableChange(ids, rows, np.sort(removed))
    return found


def rows_on_first(table: HashTable, ranks: Ranks) -> Iterator[tuple[Ints, Array]]:
    """Yield all keys and rows of a table on rank 0, some logical shards at a time; none on the others.

    Args:
      table: This rank's table.
      ranks: The ranks.
    """
    bytes_of_shard = 1 + _size(table, ranks) * 4 * table.dim // LOGICAL_SHARDS
    shards = min(max(1, PIECE // bytes_of_shard), LOGICAL_SHARDS)
    for first in range(0, LOGICAL_SHARDS, shards):
        last = min(first + shards, LOGICAL_SHARDS) if ranks.writes else first
        part = table.export_shards(first, last)
        keys, rows = on_first([part.keys.numpy(), part.rows.numpy()])
        yield keys, rows


def _size(table: HashTable, ranks: Ranks) -> int:
    """Return how many rows all ranks have."""
    return sum(collectives.allgather_objects(int(table.size()) if ranks.writes else 0))


def tables_on_first(tables: Sequence[HashTable], ranks: Ranks) -> dict[str, tuple[Ints, Array]]:
    """Return all keys and rows of tables on rank 0, by the tables' names; none on the others."""
    found = {}
    for table in tables:
        size = _size(table, ranks) * (ranks.rank == 0)
        keys, rows, place = np.empty(size, np.int64), np.empty((size, table.dim), np.float32), 0
        for some, theirs in rows_on_first(table, ranks):
            keys[place : place + len(some)], rows[place : place + len(some)] = some, theirs
            place += len(some)
        found[table.name] = keys, rows
    return found
