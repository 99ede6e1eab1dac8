"""Exposures as a source of `gmeta prepare`, with columns that point into a store of histories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import user_shards
from gmeta.core.errors import ConfigError
from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.columns import Columns, single
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.history.files.generation import Generation
from gmeta.preprocess.history.files.history_crc import history_crcs
from gmeta.preprocess.history.files.shard_reader import REQUEST, Index, ShardReader
from gmeta.preprocess.history.files.stripe import as_floats
from gmeta.preprocess.history.files.stripe_layout import count_events
from gmeta.preprocess.progress import Progress
from gmeta.preprocess.source import Source
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec
from gmeta.preprocess.tables.table_source import TableSource

GENERATION, LENGTH, CRC = "generation", "history_length", "history_crc"
"""The columns that examples have besides those of their table."""

_VALUES = 1 << 22  # values of histories that are in memory at once, unless one history has more
_FIRST = np.iinfo(np.int64).min

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pointers:
    """What examples keep of their histories.

    Attributes:
      store: The generation of the store that is read.
      generation: The table's column of generations; None: all rows read `store`.
      longest: Most events of a history.
      length: Whether the number of a history's events is kept.
      crc_of: The columns of which a checksum is kept too; none: no checksum.
    """

    store: Generation
    generation: str | None
    longest: int
    length: bool
    crc_of: tuple[str, ...]

    @property
    def columns(self) -> dict[str, ColumnSpec]:
        """The columns that are added to the table's."""
        added = [] if self.generation else [GENERATION]
        added += [LENGTH] if self.length else []
        added += [CRC] if self.crc_of else []
        return {name: ColumnSpec(source=name, dtype="int64", is_list=False) for name in added}

    def describe(self) -> str:
        """Return a text that tells these pointers from others."""
        manifest = self.store.manifest
        crc = f", crc of {', '.join(self.crc_of)}" if self.crc_of else ""
        return f"generation {manifest.generation} {manifest.digest}, longest {self.longest}{crc}"

    def make(self, users: Ints, times: Ints, generations: Ints | None) -> dict[str, Ints]:
        """Return the added columns of exposures, (N,) each."""
        newest = self.store.manifest.generation
        found = {name: np.full(len(users), newest) for name in self.columns}
        requests = np.zeros(len(users), REQUEST)
        requests["user"], requests["start"], requests["until"] = users, _FIRST, times
        requests["generation"] = newest if generations is None else generations
        shards = user_shards(users, len(self.store.manifest.shards))
        order = np.lexsort((users, shards))
        cuts = np.flatnonzero(np.diff(shards[order])) + 1
        for rows in np.split(order, cuts) if self.length and len(users) else ():
            with closing(self.store.open(int(shards[rows[0]]))) as reader:
                for part in self._parts(reader.index(), rows, users):
                    self._read(reader, requests, part, found)
        return found

    def _parts(self, index: Index, rows: Ints, users: Ints) -> list[Ints]:
        """Cut rows of a shard into parts whose histories fit in memory, or of one row."""
        known = np.isin(users[rows], index.users)
        most = np.zeros(len(rows), np.int64)
        most[known] = count_events(index)[np.searchsorted(index.users, users[rows][known])]
        values = np.minimum(most, self.longest) * (2 + len(self.crc_of))
        return np.split(rows, np.flatnonzero(np.diff(np.cumsum(values) // _VALUES)) + 1)

    def _read(self, reader: ShardReader, requests: Any, rows: Ints, found: dict[str, Ints]) -> None:
        group, columns = self.store.manifest.find(self.crc_of)
        numbers = [column.number for column in columns]
        histories = reader.scan(requests[rows], numbers, group=group, longest=self.longest)
        found[LENGTH][rows] = np.diff(histories.row_splits)
        if columns:
            values = [
                as_floats(own) if column.dtype == "float32" else own
                for column, own in zip(columns, histories.columns, strict=True)
            ]
            found[CRC][rows] = history_crcs(histories.row_splits, values)


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
            what = {
                GENERATION: "say with --generation that it is the one that was read",
                LENGTH: "keep what the ranker logged with --check none",
                CRC: "keep what the ranker logged with --check none",
            }
            raise ConfigError(
                f"{table.files[0].path} has a column {twice[0]!r}, and examples get one of this name: "
                f"{what[twice[0]]}, or leave it out by a --spec"
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

    def count(self) -> int:
        """Return the number of the table's records."""
        return self._table.count()

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the good rows of all files, in parts, with the added columns."""
        spec, generation = self.spec, self._pointers.generation
        for chunk in self._table.chunks(bad, progress):
            pointers = self._pointers.make(
                single(chunk, spec.task),
                single(chunk, spec.time or ""),
                single(chunk, generation) if generation else None,
            )
            if self._pointers.length:
                self.empty += int(np.count_nonzero(pointers[LENGTH] == 0))
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
