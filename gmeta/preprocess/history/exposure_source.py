"""Exposures as a source of `gmeta prepare`, with columns that point into a store of histories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import user_shards
from gmeta.core.errors import ConfigError
from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.columns import Columns, row_count, single
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.history.files.generation import Generation
from gmeta.preprocess.history.files.history_crc import history_crcs
from gmeta.preprocess.history.named_histories import read_histories
from gmeta.preprocess.progress import Progress
from gmeta.preprocess.source import Source
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec
from gmeta.preprocess.tables.table_source import TableSource

GENERATION, LENGTH, CRC = "generation", "history_length", "history_crc"
"""The columns that examples have besides those of their table."""

_VALUES = 1 << 22  # values of histories that are in memory at once

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pointers:
    """What examples keep of their histories.

    Attributes:
      store: The generation of the store that is read.
      generation: The table's column of generations; None: all rows read `store`.
      longest: Most events of a history.
      crc_of: The columns of which a checksum is kept; none: no checksum.
    """

    store: Generation
    generation: str | None
    longest: int
    crc_of: tuple[str, ...]

    @property
    def columns(self) -> dict[str, ColumnSpec]:
        """The columns that are added to the table's."""
        added = [] if self.generation else [GENERATION]
        added += [LENGTH, *([CRC] if self.crc_of else [])]
        return {name: ColumnSpec(source=name, dtype="int64", is_list=False) for name in added}

    def describe(self) -> str:
        """Return a text that tells these pointers from others."""
        manifest = self.store.manifest
        crc = f", crc of {', '.join(self.crc_of)}" if self.crc_of else ""
        return f"generation {manifest.generation} {manifest.digest}, longest {self.longest}{crc}"

    def make(self, users: Ints, times: Ints, generations: Ints | None) -> dict[str, Ints]:
        """Return the added columns of exposures, (N,) each, with histories of bounded size in memory."""
        newest = self.store.manifest.generation
        found = {name: np.full(len(users), newest) for name in self.columns}
        born = np.full(len(users), newest) if generations is None else generations
        order = np.argsort(user_shards(users, len(self.store.manifest.shards)), kind="stable")

        def read(rows: Ints, columns: Sequence[str]) -> Any:
            return read_histories(
                self.store,
                users[rows],
                columns,
                until=times[rows],
                generation=born[rows],
                longest=self.longest,
            )

        lengths = np.diff(read(order, ()).row_splits)
        found[LENGTH][order] = lengths
        if self.crc_of:
            part = np.cumsum(lengths * len(self.crc_of)) // _VALUES
            for rows in np.split(order, np.flatnonzero(np.diff(part)) + 1):
                histories = read(rows, self.crc_of)
                columns = [histories.columns[name] for name in self.crc_of]
                found[CRC][rows] = history_crcs(histories.row_splits, columns)
        return found


class ExposureSource:
    """A `Source` of a table's rows with the columns of `Pointers`.

    Args:
      table: The exposures.
      pointers: What is kept of their histories.

    Attributes:
      empty: Rows so far that have no history.

    Raises:
      ConfigError: The table has a column of such a name, or its time or generation isn't an int64.
    """

    def __init__(self, table: TableSource, pointers: Pointers) -> None:
        self._table, self._pointers, self.empty = table, pointers, 0
        self.path, self.name, self.defaults = table.path, table.name, PlanConfig()
        own, added = table.spec.columns, pointers.columns
        if twice := [name for name in added if name in own]:
            name = twice[0]
            which = (
                "it is the generation that was read, say so with --generation, or "
                if name == GENERATION
                else ""
            )
            raise ConfigError(
                f"{table.files[0].path} has a column {name!r}, and examples get one of this name: {which}"
                "leave it out by a --spec"
            )
        for name in filter(None, [table.spec.time, pointers.generation]):
            if own[name].dtype != "int64" or own[name].is_list:
                raise ConfigError(f"column {name!r} must be an int64 to point into a store, got {own[name]}")
        self.spec: TableSpec = replace(table.spec, columns={**own, **added})

    @property
    def rows_read(self) -> int:
        """The number of records read so far."""
        return self._table.rows_read

    def parts(self) -> Sequence[Source]:
        """Return the source itself."""
        return (self,)

    def start_digests(self) -> None:
        """Begin to digest the files."""
        self._table.start_digests()

    def digests(self) -> Mapping[str, str]:
        """Return file name -> SHA-256, and what tells the histories from others."""
        return {**self._table.digests(), "histories": self._pointers.describe()}

    def stamps(self) -> Mapping[str, Any]:
        """Return file name -> size and time of the last change, and what tells the histories from others."""
        return {**self._table.stamps(), "histories": self._pointers.describe()}

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the good rows of all files, in parts, with the added columns."""
        spec, generation = self.spec, self._pointers.generation
        for chunk in self._table.chunks(bad, progress):
            pointers = self._pointers.make(
                single(chunk, spec.task),
                single(chunk, spec.time or ""),
                single(chunk, generation) if generation else None,
            )
            self.empty += row_count(pointers) - int(np.count_nonzero(pointers[LENGTH]))
            yield {**chunk, **pointers}

    def where(self, number: int) -> tuple[Path, int | None, str]:
        """Return the file that a record is from, and its line or row."""
        return self._table.where(number)

    def check(self, tasks: Ints, bad: BadRecords) -> None:
        """Make the table's own checks."""
        self._table.check(tasks, bad)

    def holds_rows(self, file: str) -> bool:
        """Return whether a file of this name holds records."""
        return self._table.holds_rows(file)
