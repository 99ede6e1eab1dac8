"""Makes sets of examples that point into a store, and registers them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError, whole_number
from gmeta.core.history_manifest import user_shards
from gmeta.core.json_values import folder_name
from gmeta.core.schema import check_on_bad
from gmeta.preprocess.config import PlanConfig, PrepareConfig, Progress, no_progress
from gmeta.preprocess.history.example_sets import ExampleSet, list_examples, register
from gmeta.preprocess.history.generation import Generation, generations, settle_or_warn, show_numbers
from gmeta.preprocess.history.shard_reader import (
    REQUEST,
    Index,
    ShardReader,
    as_floats,
    history_crc_of_splits,
)
from gmeta.preprocess.history.shard_writer import count_events
from gmeta.preprocess.local import duckdb_engine
from gmeta.preprocess.local import duckdb_engine as memory
from gmeta.preprocess.local.preparation import prepare_source
from gmeta.preprocess.source import NUMBER, BadRecords, Columns, Source, single
from gmeta.preprocess.summary import PrepareSummary
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec
from gmeta.preprocess.tables.table_source import TableSource

if TYPE_CHECKING:
    import duckdb

# Exposures as a source of `gmeta prepare`, with columns that point into a store of histories.

GENERATION, LENGTH, CRC = "generation", "history_length", "history_crc"
"""The columns that examples have in addition to those of their table."""

_VALUES = 1 << 22  # values of histories that are in memory at once, unless one history has more
_FIRST = np.iinfo(np.int64).min

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pointers:
    """The facts that examples store about their histories.

    Attributes:
      store: The generation of the store that is read.
      generation: The table's column of generations; None: all rows read `store`.
      longest: The largest number of events of a history.
      length: Whether the number of a history's events is stored.
      crc_of: The columns whose checksum is also stored; none: no checksum.
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
        """Return a text that identifies these pointers."""
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
        """Cut rows of a shard into parts whose histories fit in memory, or that have one row."""
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
            found[CRC][rows] = history_crc_of_splits(histories.row_splits, values)


class ExposureSource:
    """A `Source` of a table's rows with the columns of `Pointers`.

    Args:
      table: The exposures.
      pointers: The facts to store about their histories.

    Attributes:
      empty: The number of rows so far without a history.

    Raises:
      ConfigError: The table has a column with the name of an added one, or its time or generation isn't an
        int64.
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
        """Return file name -> SHA-256, and the settings that identify the histories."""
        return {**self._table.digests(), "histories": self._pointers.describe()}

    def stamps(self) -> Mapping[str, Any]:
        """Return file name -> size and time of change, and the settings that identify the histories."""
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

    def write_texts(self, folder: Path) -> Sequence[str]:
        """Write the texts of the table's rows."""
        return self._table.write_texts(folder)

    def where(self, number: int) -> tuple[Path, int | None, str]:
        """Return the file that a record is from, and its line or row."""
        return self._table.where(number)

    def check(self, tasks: Ints, bad: BadRecords) -> None:
        """Make the table's own checks."""
        self._table.check(tasks, bad)

    def holds_rows(self, file: str) -> bool:
        """Return whether a file of this name holds records."""
        return self._table.holds_rows(file)


Data = str | os.PathLike[str]
CHECKS = ("length", "crc", "none")


@dataclass(frozen=True)
class ExamplesSummary:
    """The result of `history_examples`.

    Attributes:
      examples: The set, as it is registered.
      prepared: The summary of the data read, kept and left out.
      empty: Rows read that have no history; None if the set existed already, or keeps no lengths.
      bytes: The size of the set's shards, without their indexes.
    """

    examples: ExampleSet
    prepared: PrepareSummary
    empty: int | None
    bytes: int


def history_examples(
    store: Data,
    data: Data | Sequence[Data],
    out: Data,
    spec: TableSpec,
    config: PrepareConfig | None = None,
    on_bad: str = "raise",
    *,
    longest: int = 1000,
    check: str = "length",
    columns: Sequence[str] = (),
    generation: str | None = None,
    name: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    memory_limit: int | None = None,
    progress: Progress = no_progress,
) -> ExamplesSummary:
    """Make a set of examples of exposures that point into a store, for `gmeta.io.late`, and register it.

    The set is a prepared data set, as `prepare` makes it, of the exposures without their histories. An
    exposure gets up to three additional columns:

    * ``"generation"``, the newest generation of the store, unless the table names the one that was read;
    * ``"history_length"``, the number of events in its history: the newest `longest` events before the
      exposure's time that the generation held;
    * ``"history_crc"``, the checksum of that history (`history_crc_of_splits`).

    The last two describe the store's events. A ranker that read more events, the tail, logs its own numbers.

    As long as the set is registered, the generations that its rows name stay in the store; `remove_examples`
    unregisters it.

    Args:
      store: The store's folder.
      data: Files, folders or patterns of CSV, Parquet or JSON lines.
      out: The folder to make. One that was made from the same data, settings and generation is reused.
      spec: The exposures' columns: the task is the user, and the time is in the store's unit.
      config: Settings of the data set. None: one record holds all exposures of a user, which takes the fewest
        bytes, and ``late(share="window")`` makes examples from them. With ``batch_rows=1`` each exposure is
        an example, of about 200 bytes.
      on_bad: ``"raise"`` ends the run at the first bad record; ``"skip"`` counts each and leaves it out. A
        row that names a missing generation ends the run under either rule.
      longest: The largest number of events of a history.
      check: ``"length"``, ``"crc"`` for the checksum too, or ``"none"`` for neither.
      columns: The columns of events that the checksum of ``"crc"`` covers, of one group or the time, in the
        order in which `gmeta.io.late` receives them.
      generation: The table's column with the generation that the ranker read. None: the newest now.
      name: The set's name in the store. None: that of the folder.
      overwrite: Replace a prepared data set that differs.
      resume: Continue a killed run, as for `prepare`.
      memory_limit: Bytes of memory to stay within; in addition, the index of a shard must fit. None: half of
        the available memory.
      progress: Called with the progress of the stages ``"read"``, ``"sort"`` and ``"write"``.

    Returns:
      The set and a summary.

    Raises:
      ConfigError: A column doesn't exist or has a name that examples need, an argument is out of range, or
        another set has the name or the folder.
      DataError: As for `prepare`; or a row names a generation that the store doesn't have, or the store is
        damaged.
      GmetaError: ``out`` holds something else, or it or the store can't be written.

    Example:
      >>> spec = TableSpec("user", time="ts", label="click")
      >>> history_examples("histories", "shown.parquet", "examples", spec)  # doctest: +SKIP
      >>> late("examples/train", HistoryStore("histories"), generation="generation", ...)  # doctest: +SKIP

    References:
      Versioned Late Materialization, section 3.3.
    """
    store, out = Path(store), Path(out)
    settle_or_warn(store)
    name = out.absolute().name if name is None else name
    pointers = _check(Generation(store), spec, longest, check, columns, generation)
    folder = os.path.realpath(out)
    _refuse_taken(store, name, folder)
    files = [data] if isinstance(data, str | os.PathLike) else list(data)
    named, opened = {pointers.store.manifest.generation}, list[ExposureSource]()
    if generation is not None:
        named = _find_generations(pointers.store, files, spec, generation, on_bad, memory_limit)

    def open_source(connection: duckdb.DuckDBPyConnection, bad: BadRecords) -> ExposureSource:
        opened.append(ExposureSource(TableSource(files, given, connection), pointers))
        return opened[0]

    given = spec if generation is None else _with_column(spec, generation)
    prepared = prepare_source(
        open_source,
        out,
        config,
        on_bad,
        overwrite=overwrite,
        resume=resume,
        memory_limit=memory_limit,
        progress=progress,
    )
    manifest = Manifest.load(out)
    examples = ExampleSet(name, folder, manifest.digest, prepared.rows, tuple(sorted(named)), longest)
    register(store, examples)
    empty = opened[0].empty if pointers.length and not prepared.reused else None
    size = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    return ExamplesSummary(examples, prepared, empty, size)


def _check(
    opened: Generation,
    spec: TableSpec,
    longest: int,
    check: str,
    columns: Sequence[str],
    generation: str | None,
) -> Pointers:
    if spec.time is None:
        raise ConfigError("examples need the time of each exposure: name its column, with --time or a spec")
    if check not in CHECKS:
        raise ConfigError(f"check must be one of {', '.join(CHECKS)}, got {check!r}")
    if isinstance(columns, str) or bool(columns) != (check == "crc"):
        raise ConfigError(
            "columns must be those of which check='crc' makes the checksum, got "
            f"{columns!r} and check={check!r}"
        )
    opened.manifest.find(columns)
    whole_number("longest", longest, least=1)
    return Pointers(opened, generation, longest, check != "none", tuple(columns))


def _refuse_taken(store: Path, name: str, folder: str) -> None:
    try:
        folder_name(f"{name}.json", "the examples' name")
    except ValueError as error:
        raise ConfigError(f"{error}: give another --name") from error
    for known in list_examples(store):
        if (known.name == name) != (known.folder == folder):
            raise ConfigError(
                f"{store} has examples {known.name!r} at {known.folder} already, and these are {name!r} at "
                f"{folder}: give another --name or folder, or unregister them with `gmeta history examples "
                f"{store} --remove {known.name}`"
            )


def _with_column(spec: TableSpec, name: str) -> TableSpec:
    """Return the spec with a column added, if the spec lists its columns and this isn't one of them."""
    if not spec.columns or name in spec.columns:
        return spec
    return replace(spec, columns={**spec.columns, name: ColumnSpec(dtype="int64")})


def _find_generations(
    opened: Generation,
    files: Sequence[Data],
    spec: TableSpec,
    column: str,
    on_bad: str,
    memory_limit: int | None,
) -> set[int]:
    """Return the generations that a table names; refuse one that the store doesn't have."""
    newest, named = opened.manifest.generation, set[int]()
    there = [number for number in generations(opened.store) if number <= newest]
    own = {column: spec.columns.get(column, ColumnSpec())}
    with closing(duckdb_engine.connect(memory_limit or memory.default_limit())) as connection:
        table = TableSource(files, TableSpec(column, columns=own, csv=spec.csv), connection)
        for chunk in table.chunks(BadRecords(check_on_bad(on_bad)), no_progress):
            found = single(chunk, column)
            strange = np.flatnonzero(~np.isin(found, there))
            if len(strange):
                path, line, place = table.where(int(single(chunk, NUMBER)[strange[0]]))
                raise DataError(
                    f"{place}generation {found[strange[0]]} was read, and {opened.store} has "
                    f"{show_numbers(there)}",
                    path=path,
                    line=line,
                    advice="open the store that the ranker read, or leave the row out",
                )
            named |= {*np.unique(found).tolist()}
    return named
