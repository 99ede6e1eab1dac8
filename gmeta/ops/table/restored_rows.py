"""Finds a model's tables, and restores their rows from those saved by table name or from a snapshot.

If tables were merged differently when they were saved (`gmeta.core.merged_tables`), their keys are converted.
A row's age, the number of steps since its last use, is preserved: if sources are at different steps, last
steps are shifted by the difference. The counts of an admission filter then aren't loaded, because a filter
has no ids.

A `TableSnapshot` restores a table's content at an earlier time. In host memory, taking a snapshot copies no
rows. The table copies a record before it first changes, so a snapshot costs only the rows that are used while
it exists (``ops/table/host/undo_log.h``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError, warn_caller
from gmeta.core.merged_tables import Fold, MergedKeys, NamedTable, tables_by_full_name
from gmeta.core.native import load_op_library
from gmeta.ops.table.followed_optimizer import with_fresh_slots
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.records import AdmissionState, Records

Pair = tuple[NamedTable, NamedTable]
"""A table, and its saved rows."""

Keep = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class SavedTable:
    """A physical table as it was saved.

    Attributes:
      merged: The tables that were merged in it; None if it wasn't merged, or if that wasn't recorded.
      dim: Width of a row.
      optimizer: The kind of its optimizer.
      step: Its step.
      batches: Reads the records in batches, as arrays.
      waiting: Reads the ids that waited for admission with exact counts, in batches.
    """

    merged: MergedKeys | None
    dim: int
    optimizer: str
    step: int
    batches: Callable[[], Iterable[Records]]
    waiting: Callable[[], Iterable[AdmissionState]] = tuple


@dataclass(frozen=True)
class Moves:
    """A plan of which saved rows are loaded into which tables.

    Attributes:
      own: Full name -> table.
      saved: Full name -> saved table.
      matched: Full name of a table -> the saved table that is loaded into it.
      misfits: Saved tables that can't be loaded, with the reason.
      without_slots: Tables whose rows are loaded without slots, because their optimizer is now of another
        kind.
      sources: Physical table -> the saved physical tables with rows of its tables, and these tables.
      folds: Physical table -> the fold of the hashed ids that are loaded into it, if any.
    """

    own: Mapping[str, NamedTable]
    saved: Mapping[str, NamedTable]
    matched: Mapping[str, NamedTable]
    misfits: Mapping[str, str]
    without_slots: tuple[str, ...]
    sources: Mapping[str, list[tuple[str, list[Pair]]]]
    folds: Mapping[str, Fold]

    @property
    def fresh(self) -> dict[str, str]:
        """The tables that receive no rows, by full name, each with the reason; includes misfits."""
        fresh = (full for full in self.own if full not in self.matched)
        return {full: self.misfits.get(full, "it was not saved") for full in fresh}

    @property
    def left(self) -> list[str]:
        """The saved tables whose rows aren't loaded, by full name; includes misfits."""
        taken = list(self.matched.values())
        return [full for full, each in self.saved.items() if each not in taken]

    def whole(self, name: str, table: HashTable, saved: Mapping[str, SavedTable]) -> str | None:
        """Return the saved table from which a table can be loaded unchanged; None: keys or slots change."""
        if len(self.sources[name]) != 1:
            return None
        ((origin, pairs),) = self.sources[name]
        merged = table.merged_keys
        same = _in_words(_merged(origin, saved[origin], {name: table})) == _in_words(merged)
        every = len(pairs) == (1 if merged is None else len(merged.tables))
        return origin if same and every and keeps_slots(table, saved[origin].optimizer) else None

    def follow_folds(self, tables: Mapping[str, HashTable]) -> None:
        """Make the tables fold hashed ids like those of the rows to be loaded."""
        for name, fold in self.folds.items():
            tables[name].follow_fold(fold)

    @property
    def omissions(self) -> list[str]:
        """Clauses for a message about what isn't loaded."""
        return [
            *(f"{full} is reinitialized: {why}" for full, why in self.fresh.items()),
            *(f"the rows of {full} are left out" for full in self.left if full not in self.misfits),
            *(
                f"the optimizer's slots of {full} are reinitialized: the checkpoint has another optimizer's"
                for full in self.without_slots
            ),
        ]


def plan_moves(tables: Mapping[str, HashTable], saved: Mapping[str, SavedTable]) -> Moves:
    """Find the saved rows of tables by name.

    Args:
      tables: Name -> physical table.
      saved: Name -> physical table as it was saved.
    """
    own = tables_by_full_name({name: table.merged_keys for name, table in tables.items()})
    there = tables_by_full_name({name: _merged(name, each, tables) for name, each in saved.items()})
    matched, misfits, without_slots = dict[str, NamedTable](), dict[str, str](), list[str]()
    sources: dict[str, dict[str, list[Pair]]] = {name: {} for name in tables}
    folds: dict[str, Fold] = {}
    for full in (name for name in own if name in there):
        mine, from_ = own[full], there[full]
        table, origin = tables[mine.physical], saved[from_.physical]
        why = mine.why_not_from(from_)
        if not why and from_.fold and folds.get(mine.physical, from_.fold) != from_.fold:
            why = (
                f"its ids were hashed by the fold {from_.fold!r}, and those of tables that are merged with "
                f"it now by {folds[mine.physical]!r}: give it another width or policy than these"
            )
        if origin.dim != table.dim:
            why = f"its rows were {origin.dim} wide, and are {table.dim} wide now"
        if why:
            misfits[full] = why
            continue
        matched[full] = from_
        if from_.fold:
            folds[mine.physical] = from_.fold
        sources[mine.physical].setdefault(from_.physical, []).append((mine, from_))
        if not keeps_slots(table, origin.optimizer):
            without_slots.append(full)
    listed = {name: list(each.items()) for name, each in sources.items()}
    return Moves(own, there, matched, misfits, tuple(without_slots), listed, folds)


def _merged(name: str, saved: SavedTable, tables: Mapping[str, HashTable]) -> MergedKeys | None:
    """Return the tables merged in a saved table; if not recorded, those of the table of that name."""
    if saved.merged is not None or name not in tables:
        return saved.merged
    own = tables[name].merged_keys
    return own and replace(own, fold="xor")  # the fold of older versions


def _in_words(merged: MergedKeys | None) -> Mapping[str, object] | None:
    return None if merged is None else merged.to_json()


def keeps_slots(table: HashTable, kind: str) -> bool:
    """Return whether slots of a kind of optimizer fit a table, or the table adopts that kind."""
    return kind == table.optimizer.kind or table.follows


def fit_slots(table: HashTable, kind: str) -> Callable[[Records], Records]:
    """Return a function that adds a table's slots to records saved with a kind of optimizer."""
    if kind == table.optimizer.kind:
        return lambda records: records
    if table.follows:
        return table.take_records_of(kind)
    return lambda records: with_fresh_slots(records, table.optimizer, table.dim)


def fill_table(
    table: HashTable, sources: Sequence[tuple[SavedTable, Sequence[Pair]]], keep: Keep | None = None
) -> tuple[int, int]:
    """Replace a table's content by saved rows.

    Args:
      table: The table.
      sources: The sources of its rows, from `plan_moves`; without any, the table is emptied.
      keep: Which of the table's keys to import; None: all.

    Returns:
      The numbers of imported rows, and of imported ids that wait for admission.

    Raises:
      DataError: An id exceeds the current limit of ids; the table's content is then undefined.
    """
    fits = [fit_slots(table, saved.optimizer) for saved, _ in sources]
    step = max((saved.step for saved, _ in sources), default=0)
    clear_table(table, step)
    rows = waiting = 0
    for (saved, pairs), fit in zip(sources, fits, strict=True):
        for batch in saved.batches():
            place, keys = _own(np.asarray(batch.keys), pairs, keep)
            if len(keys):
                own = batch._replace(keys=keys, step=np.int64(step))
                for name in ("rows", "slots", "frequency", "last_step"):
                    own = own._replace(**{name: np.asarray(getattr(batch, name))[place]})
                last_step = own.last_step.astype(np.int64) + (step - saved.step)
                table.import_(fit(own._replace(last_step=last_step)))
                rows += len(keys)
        for state in saved.waiting():
            place, keys = _own(np.asarray(state.keys), pairs, keep)
            counts = np.asarray(state.counts)[place]
            waiting += len(keys)
            table.import_admission(AdmissionState(keys, counts, np.empty(0, np.uint8)), replace=False)
    return rows, waiting


def warn_of_filters(table: HashTable, names: Sequence[str]) -> None:
    """Warn that a table's admission restarts counting from 0, because the saved filters can't be loaded."""
    warn_caller(
        f"table {table.name!r}: ids without a row are counted from 0 again, because the filter of "
        f"{', '.join(map(repr, names))} has counted keys, which have changed"
    )


def clear_table(table: HashTable, step: int) -> None:
    """Remove all rows of a physical table, and set its step."""
    nothing = np.empty(0, np.int64)
    slots = np.empty((0, table.optimizer.slot_floats(table.dim)), np.float32)
    rows = np.empty((0, table.dim), np.float32)
    table.import_(Records(nothing, rows, slots, nothing, nothing, np.int64(step)), replace=True)


def _own(
    keys: npt.NDArray[np.int64], pairs: Sequence[Pair], keep: Keep | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Find the keys of some tables; return their places, and the converted keys."""
    places, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for own, saved in pairs:
        there, moved = own.keys_from(saved, keys)
        places.append(np.flatnonzero(there))
        found.append(moved)
    place, moved = np.concatenate(places), np.concatenate(found)
    if keep is None or not len(moved):
        return place, moved
    kept = keep(moved)
    return place[kept], moved[kept]


_native = load_op_library("ops")


class TableSnapshot:
    """A snapshot of a table's records, optimizer slots, step and admission at the time of its creation.

    Any number of snapshots of a table may exist at once; each is freed with its object. While a snapshot
    exists, the table keeps a copy, in float32, of each record that was used or removed since. If every row is
    used, these copies grow to the size of the whole table. The admission state of ids without a row is copied
    immediately. A table on a GPU can't record changes: its snapshot is a full copy in host memory.

    Args:
      table: The table. Make and restore snapshots between two steps, in eager mode.

    Attributes:
      table: The table.
      optimizer: The kind of its optimizer.
      step: The table's step.
      admission: The state of admission.

    Example:
      >>> table = HashTable(1, name="item")
      >>> before = TableSnapshot(table)
      >>> _ = table.lookup([3, 4])  # makes two rows
      >>> before.restore()
      >>> int(table.size())
      0
    """

    def __init__(self, table: HashTable) -> None:
        self.table = table
        self._number: tf.Tensor | None = None
        self._records: Records | None = None
        self.optimizer = table.optimizer.kind
        with tf.init_scope():
            self.step, self._state = int(table.step()), _state(table)
            self.admission: AdmissionState = table.export_admission()
            self._times = table.step_times
            if table.device == "gpu":
                with tf.device("CPU:0"):
                    self._records = Records(*(tf.identity(part) for part in table.export()))
                return
            handle = table.resource_handle
            self._number = _native.gmeta_hash_table_take_snapshot(handle)
        weakref.finalize(self, _drop, handle, self._number).atexit = False

    def restore(self) -> None:
        """Restore the table's content. This snapshot and later ones stay valid.

        Raises:
          ConfigError: The table's optimizer has changed since.
        """
        with tf.init_scope():
            if self.optimizer != self.table.optimizer.kind:
                raise ConfigError(self._end_reason)
            if self._records is not None:
                self.table.import_(self._records, replace=True)
            else:
                self.table.imports += 1
                try:
                    _native.gmeta_hash_table_restore_snapshot(self.table.resource_handle, self._number)
                except tf.errors.InvalidArgumentError as error:
                    raise ConfigError(self._end_reason) from error
            self.table.import_admission(self.admission)
            self.table.set_step_times([] if self._times is None else self._times)

    def records(self) -> Records:
        """Return the table's records at the time of the snapshot, for another table.

        If the table has changed since, it is temporarily restored for the copy: call this between two steps.

        Raises:
          ConfigError: The table's optimizer has changed since.
        """
        if self._records is not None:
            return self._records
        with tf.init_scope():
            if self._state == _state(self.table):
                return self.table.export()
            now = TableSnapshot(self.table)
            try:
                self.restore()
                return self.table.export()
            finally:
                now.restore()

    @property
    def _end_reason(self) -> str:
        return (
            f"table {self.table.name!r} has another optimizer now than when the snapshot was taken, whose "
            "slots differ: take snapshots after compile"
        )


def _state(table: HashTable) -> tuple[int, ...]:
    """Return numbers, at least one of which changes whenever the table's records change."""
    counts = table.statistics()
    used = (counts.hits, counts.misses, counts.updates, counts.removes, counts.evictions)
    return (table.imports, int(table.step()), int(counts.size), *map(int, used))


def _drop(handle: tf.Tensor, number: tf.Tensor) -> None:
    with tf.init_scope():  # garbage collection may run while a function is traced
        _native.gmeta_hash_table_drop_snapshot(handle, number)


def tables_by_name(model: tf.keras.Model) -> dict[str, HashTable]:
    """Find every `HashTable` in any layer of a model, by the table's name.

    Raises:
      ConfigError: Two tables have the same name.
    """
    tables: dict[str, HashTable] = {}
    for thing in (model, *tf.train.TrackableView(model).descendants()):
        held = getattr(thing, "tables", ())  # a collection: checkpoints store its tables as one object
        for table in (thing, *(held if isinstance(held, Sequence) else ())):
            if isinstance(table, HashTable) and tables.setdefault(table.name, table) is not table:
                raise ConfigError(
                    f"two tables of the model are named {table.name!r}: give their EmbeddingCollections "
                    "different names"
                )
    return tables
