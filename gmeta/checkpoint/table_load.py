"""Loads this rank's part of the tables of a sharded checkpoint.

For a table whose keys haven't changed since the save, a rank reads the logical shards that it owns. The rows
of other tables are found by the tables' names (`gmeta.ops.table.restored_rows`). Their keys change, and so do
the logical shards, so every rank reads all rows of these tables and keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.checkpoint.chain import CheckpointReader
from gmeta.checkpoint.manifest import TableEntry
from gmeta.checkpoint.table_part import layout, load_admission, read_waiting
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.shares import LOGICAL_SHARDS
from gmeta.ops.distinct import owned_by
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.records import AdmissionState, Records
from gmeta.ops.table.restored_rows import (
    SavedTable,
    clear_table,
    fill_table,
    fit_slots,
    plan_moves,
)

_ROWS_AT_A_TIME = 4096
_ALL_SHARDS = range(LOGICAL_SHARDS)


@dataclass(frozen=True)
class Loaded:
    """What was loaded into a physical table.

    Attributes:
      rows: Number of rows that this rank read into it.
      waiting: Number of ids, waiting for admission with exact counts, that it read.
      forgotten: Why the state of admission couldn't be loaded; empty if it was.
      origin: The saved table from which it was loaded unchanged; None if keys or slots have changed.
    """

    rows: int
    waiting: int
    forgotten: str
    origin: str | None


class TableLoader:
    """Loads tables from a checkpoint.

    Args:
      reader: The checkpoint.
      tables: Name -> the table to fill.
      partial: Whether tables may be missing in the checkpoint, or have other widths or optimizers there.

    Attributes:
      moves: Which saved rows go where.

    Raises:
      ConfigError: A table's width or optimizer differs from the saved one, or ids can't be converted.
      DataError: The checkpoint lacks a table.
    """

    def __init__(self, reader: CheckpointReader, tables: Mapping[str, HashTable], *, partial: bool) -> None:
        self._reader, self._tables = reader, tables
        self._saved = {name: self._describe(name, entry) for name, entry in reader.manifest.tables.items()}
        self.moves = plan_moves(tables, self._saved)
        if not partial:
            self._check()
        self.moves.follow_folds(tables)

    def load(self, name: str, shards: range, owner: int, owners: int) -> Loaded:
        """Replace a table's content with this rank's part of its saved content.

        Args:
          name: The table's name.
          shards: The logical shards that this rank owns.
          owner: The number of this rank among those that divide the rows.
          owners: Number of ranks that divide the rows.

        Raises:
          DataError: A file is missing or damaged, or an id is above the limit of ids. The table's content is
            then undefined.
        """
        table = self._tables[name]
        origin = self.moves.whole(name, table, self._saved)
        if origin is not None:
            return self._load_whole(origin, table, shards)
        sources = [(self._saved[source], pairs) for source, pairs in self.moves.sources[name]]
        keep = None if owners == 1 else lambda keys: owned_by(keys, owner, owners).numpy()
        rows, waiting = fill_table(table, sources, keep)
        return Loaded(rows, waiting, self._why_forgotten(name), None)

    def count(self, full: str) -> int:
        """Count the saved rows of a table."""
        table = self.moves.saved[full]
        batches = self._saved[table.physical].batches()
        return sum(len(table.own({"keys": np.asarray(batch.keys)})["keys"]) for batch in batches)

    def _describe(self, name: str, entry: TableEntry) -> SavedTable:
        def waiting() -> Iterator[AdmissionState]:
            for keys, counts in read_waiting(self._reader, name, _ALL_SHARDS):
                yield AdmissionState(keys, counts, np.empty(0, np.uint8))

        return SavedTable(
            entry.merged_keys,
            entry.dim,
            entry.optimizer,
            entry.step,
            lambda: self._records(name, _ALL_SHARDS),
            waiting,
        )

    def _check(self) -> None:
        """Refuse tables that the checkpoint doesn't have, or whose records don't fit."""
        path, moves = self._reader.links[-1].folder, self.moves
        advice = "load what fits with partial=True"
        for full, own in moves.own.items():
            if full not in moves.saved:
                raise DataError(
                    f"no table {full!r} in this checkpoint",
                    path=path,
                    advice=f"it has {', '.join(map(repr, moves.saved)) or 'none'}; give the table its "
                    f"name there, or {advice}",
                )
            mine = layout(self._tables[own.physical])
            entry = self._reader.manifest.tables[moves.saved[full].physical]
            saved = {key: getattr(entry, key) for key in mine}
            if mine["dim"] != saved["dim"] or full in moves.without_slots:
                raise ConfigError(
                    f"{path}: table {full!r} was saved with {_in_words(saved)}, but the table to fill has "
                    f"{_in_words(mine)}: make it with the saved dim and optimizer, or {advice}"
                )
            if full in moves.misfits:
                raise ConfigError(
                    f"{path}: table {full!r} can't be loaded: {moves.misfits[full]}; make it as it was "
                    f"saved, or {advice}"
                )

    def _why_forgotten(self, name: str) -> str:
        saved, sources = self._reader.manifest.tables, self.moves.sources[name]
        filters = [repr(origin) for origin, _ in sources if saved[origin].filter is not None]
        counted = f"the filter of {', '.join(filters)} has counted keys, which have changed"
        return counted if filters else ""

    def _load_whole(self, origin: str, table: HashTable, shards: range) -> Loaded:
        entry = self._reader.manifest.tables[origin]
        fit = fit_slots(table, entry.optimizer)
        self._reader.open_files(origin, shards)  # check their sizes before reserving what the manifest claims
        clear_table(table, entry.step)
        table.set_step_times(entry.step_times)
        table.reserve(entry.live_in(shards))
        rows = 0
        for records in self._records(origin, shards):
            rows += len(records.keys)
            table.import_(fit(records))
        return Loaded(rows, *load_admission(self._reader, origin, table, shards), origin)

    def _records(self, name: str, shards: range) -> Iterator[Records]:
        """Read the shards' records; join small shards: an import costs as much as some hundreds of rows."""

        def read(first: int) -> tuple[dict[str, npt.NDArray[Any]], int]:
            found = [self._reader.read_shard(name, first)]
            while first + len(found) < shards.stop and sum(len(c["key"]) for c in found) < _ROWS_AT_A_TIME:
                found.append(self._reader.read_shard(name, first + len(found)))
            joined = {field: np.concatenate([columns[field] for columns in found]) for field in found[0]}
            return joined if len(found) > 1 else found[0], first + len(found)

        step = np.int64(self._reader.manifest.tables[name].step)
        with ThreadPoolExecutor(1) as ahead:  # reads the next ones while these go into the table
            coming: Future[tuple[dict[str, npt.NDArray[Any]], int]] | None = ahead.submit(read, shards.start)
            while coming is not None:
                columns, after = coming.result()
                coming = ahead.submit(read, after) if after < shards.stop else None
                yield Records(
                    columns["key"],
                    columns["weights"],
                    columns["slots"],
                    columns["frequency"].astype(np.int64),
                    columns["last_step"].astype(np.int64),
                    step,
                )


def count_rows(checkpoint: Path, tables: Sequence[str]) -> dict[str, int]:
    """Count the rows of tables of a checkpoint: full name -> rows."""
    if not tables:
        return {}
    with CheckpointReader(checkpoint) as reader:
        loader = TableLoader(reader, {}, partial=True)
        return {full: loader.count(full) for full in tables}


def _in_words(form: Mapping[str, Any]) -> str:
    return f"dim {form['dim']}, optimizer {form['optimizer']} ({form['slot_floats']} slot floats a row)"
