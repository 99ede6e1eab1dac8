"""Appends events of tables and of prepared data sets to a store of histories, in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.event_file import EventForm, event_form, is_event_file, read_events
from gmeta.core.history_manifest import HistoryManifest, HistoryShard, current_generation, dropped_inputs
from gmeta.core.schema import check_on_bad
from gmeta.preprocess.config import Progress, no_progress
from gmeta.preprocess.history.generation import Generation, generations, new_generation, settle_or_warn
from gmeta.preprocess.history.shard_reader import as_floats, as_words
from gmeta.preprocess.history.shard_writer import (
    EventSpill,
    find_joined,
    read_earlier,
    sort_events,
    write_shard,
)
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.local import duckdb_engine
from gmeta.preprocess.local import duckdb_engine as memory
from gmeta.preprocess.plan.column_types import unit_of
from gmeta.preprocess.source import BadRecords, Columns, single
from gmeta.preprocess.table_spec import CsvForm, TableSpec
from gmeta.preprocess.tables.prepared_source import PreparedSource, is_prepared
from gmeta.preprocess.tables.table_files import FileDigests, find_files, holds_records, refuse_equal
from gmeta.preprocess.tables.table_source import TableSource

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


# Files of events in a store's own form (`gmeta.core.event_file`) as a source of an append.


@dataclass(frozen=True)
class _File:
    path: Path


class EventSource:
    """The events that `gmeta.io.RecentHistories.drain` wrote.

    Args:
      paths: The files.
      store: The store.

    Attributes:
      path: The first file.
      files: The files.
      spec: The store's columns: the rules of a spec were applied when the events arrived.

    Raises:
      ConfigError: There is no store yet, a file has other columns than the store, or one is a table.
      DataError: A file is damaged.
    """

    def __init__(self, paths: Sequence[Path], store: Path) -> None:
        self.path, self.files = paths[0], [_File(path) for path in paths]
        newest = current_generation(store)
        if not newest:
            raise ConfigError(f"{store} isn't the store that the events of {paths[0]} are for: it is empty")
        manifest = HistoryManifest.load(store, newest)
        self.spec, self._form = HistorySpec.from_json(manifest.spec).table(), EventForm.of(manifest)
        for path in paths:
            if not is_event_file(path):
                raise ConfigError(
                    f"{path} is a table, and {paths[0]} has events of a store: append them one by one"
                )
            if (found := event_form(path)) != self._form:
                raise ConfigError(
                    f"{path} has events of a store with {_names(found)}; {store} has {_names(self._form)}"
                )
        self._digests = FileDigests(paths)

    def start_digests(self) -> None:
        """Begin to digest the files, in parallel with other work."""
        self._digests.start()

    def digests(self) -> Mapping[str, str]:
        """Wait for the digests and return them, file name -> SHA-256.

        Raises:
          DataError: A file has changed since reading began.
        """
        return self._digests.wait()

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the events of each file; a damaged file ends the reading whatever the rule for records is.

        Raises:
          DataError: A file is damaged, or has no event.
        """
        for number, file in enumerate(self.files, 1):
            words = np.ascontiguousarray(read_events(file.path).T)
            if not words.shape[1]:
                raise DataError("there is no event in it", path=file.path)
            yield {
                column.name: as_floats(own) if column.dtype == "float32" else own
                for column, own in zip(self._form.words, words, strict=True)
            }
            progress("read", number, len(self.files))


def _names(form: EventForm) -> str:
    return ", ".join(f"{column.name} ({column.dtype})" for column in form.words)


# An append in three steps that every engine takes: plan it, write its shards, finish its generation.
#
# ::
#
#     plan_append      check that the store, the columns and the watermark fit, and no file was read before
#     event_words      rows of a table ──> rows of 64-bit words, in any order, for `user_shards`
#     append_shard     all new events of a shard ──> its stripes and its index    (each shard by itself)
#     finish_append    the entries of all shards ──> the manifest
#
# An engine does the rest: it brings the events of each shard together. So all engines write the same bytes.

MAX_TIME = 2**63 - 1
"""The bound below which all times of events lie."""


@dataclass(frozen=True)
class AppendPlan:
    """The plan of an append.

    Attributes:
      store: The store's folder.
      before: The store's generation; 0 if it has none. The append makes the next one.
      spec: The columns, as `HistorySpec.resolve` returned them.
      watermark: The requested watermark; None: after the latest event.
    """

    store: str
    before: int
    spec: HistorySpec
    watermark: int | None = None

    @property
    def generation(self) -> int:
        """The generation that the append makes."""
        return self.before + 1

    def open_before(self) -> Generation | None:
        """Open the store's generation, if it has one."""
        return Generation(Path(self.store), self.before) if self.before else None

    def load(self) -> HistoryManifest:
        """Return the manifest of the generation that the append has made."""
        return HistoryManifest.load(Path(self.store), self.generation)


@dataclass(frozen=True)
class NewShard:
    """The part of a shard that an append has written.

    Attributes:
      shard: The manifest's entry.
      reads: The generations whose files the index names.
      events: New events.
      latest: The latest time of a new event; None if there is none.
    """

    shard: HistoryShard
    reads: tuple[int, ...]
    events: int
    latest: int | None


def choose_spec(store: Path, given: HistorySpec | None) -> HistorySpec:
    """Return the spec for reading events: the given one, or that of the first append.

    Raises:
      ConfigError: There is no spec.
    """
    if given is not None:
        return given
    newest = current_generation(store)
    if not newest:
        raise ConfigError(
            f"{store} has no events yet: name the columns of users and times, with --user and --time, or "
            "a --spec"
        )
    return HistorySpec.from_json(HistoryManifest.load(store, newest).spec)


def plan_append(store: Path, spec: HistorySpec, table: TableSpec, watermark: int | None) -> AppendPlan:
    """Plan an append.

    Args:
      store: The store's folder.
      spec: What `choose_spec` returned.
      table: What `TableSpec.resolve` returned for the spec's table.
      watermark: The requested watermark; None: after the latest event.

    Raises:
      ConfigError: The store was made with another spec, or the watermark would decrease.
    """
    own, before = spec.resolve(table), current_generation(store)
    if watermark is not None and not -(2**63) <= watermark <= MAX_TIME:
        raise ConfigError(f"watermark must be an int64, got {watermark}")
    if before:
        manifest = HistoryManifest.load(store, before)
        here, there = own.to_json(), manifest.spec
        if other := [name for name in there if here[name] != there[name]]:
            raise ConfigError(
                f"{store} was made with other {' and '.join(other)}: {other[0]} is {there[other[0]]} there, "
                f"and not {here[other[0]]}; without a spec, an append reads columns as the first one did"
            )
        if watermark is not None and watermark < manifest.watermark:
            raise ConfigError(
                f"watermark {watermark} is earlier than {manifest.watermark}, that of the store"
            )
    return AppendPlan(str(store), before, own, watermark)


def refuse_known(store: Path, inputs: Mapping[str, str], paths: Sequence[Path], form: CsvForm) -> None:
    """Refuse files that an earlier append has read: their events would occur twice.

    Files without records are accepted: they hold no events, and an engine may write the same one every day.

    Args:
      store: The store's folder.
      inputs: The file's name -> its digest.
      paths: The files, in the order of `inputs`; () if this machine can't open them as files of a table.
      form: The format of CSV files.

    Raises:
      DataError: An earlier append has read one of the files.
    """
    numbers = generations(store)
    known = {digest: f"generation {n}" for n in numbers for digest in _inputs(store, n)}
    known |= dict.fromkeys(dropped_inputs(store) - known.keys(), "a generation that was dropped")
    for place, (name, digest) in enumerate(inputs.items()):
        if digest in known and (not paths or holds_records(paths[place], form)):
            raise DataError(
                f"{known[digest]} holds the events of {name} already",
                path=store,
                advice="leave the file out",
            )


def _inputs(store: Path, generation: int) -> Collection[str]:
    return HistoryManifest.load(store, generation).inputs.values()


def event_words(spec: HistorySpec, rows: Columns) -> NDArray[np.int64]:
    """Return the words of events, (N, columns) int64, in the order of `HistorySpec.all_columns`.

    Raises:
      DataError: A time is `MAX_TIME` or later: no history could end after it.
    """
    words = np.stack([as_words(single(rows, name)) for name in spec.all_columns], axis=1)
    if len(words) and (last := int(words[:, 1].max())) >= MAX_TIME:
        user = words[int(words[:, 1].argmax()), 0]
        raise DataError(
            f"user {user} has an event at time {last}; times must be below {MAX_TIME}",
            advice="leave the event out, or state max for this column in a spec",
        )
    return words


def append_shard(
    plan: AppendPlan, before: Generation | None, folder: Path, number: int, words: NDArray[np.int64]
) -> NewShard:
    """Write the stripes and the index of a shard.

    Args:
      plan: The plan.
      before: What `AppendPlan.open_before` returned.
      folder: The folder to write to.
      number: The shard's number.
      words: (N, columns) int64: all its new events, in any order.

    Raises:
      DataError: The earlier index of the shard, or a stripe to rewrite, is damaged.
      OSError: The disk is full.
    """
    rows, earlier = sort_events(words), read_earlier(before, number)
    written = write_shard(
        folder,
        number,
        plan.generation,
        rows,
        plan.spec.group_numbers,
        plan.spec.stripe_events,
        earlier,
        find_joined(earlier.stripes, rows[:, 0], plan.spec.stripe_events),
    )
    latest = int(rows[:, 1].max()) if len(rows) else None
    return NewShard(written.shard, tuple(sorted(written.reads)), len(rows), latest)


def finish_append(
    plan: AppendPlan, folder: Path, shards: Sequence[NewShard], inputs: Mapping[str, str]
) -> HistoryManifest:
    """Write the manifest of a generation whose shards are all written.

    Args:
      plan: The plan.
      folder: The generation's folder.
      shards: The written part of each shard, in order.
      inputs: The files that were read -> their digests.

    Raises:
      DataError: The events' times have another unit than the store's.
    """
    before = plan.open_before()
    latest = [each.latest for each in shards if each.latest is not None]
    if before is not None:
        _refuse_other_unit(before.manifest.watermark, max(latest, default=0))
    manifest = HistoryManifest(
        plan.generation,
        plan.spec.group_columns(),
        tuple(each.shard for each in shards),
        _watermark(plan, before, latest),
        before.manifest.start if before else None,
        inputs,
        tuple(sorted({number for each in shards for number in each.reads})),
        plan.spec.to_json(),
    )
    manifest.save(folder)
    return manifest


def _refuse_other_unit(watermark: int, latest: int) -> None:
    there, here = unit_of(watermark), unit_of(latest)
    if there and here and there != here:
        raise DataError(
            f"the store's times are {there} such as {watermark}, and the new events' {here} such as {latest}",
            advice=f"write them in {there}",
        )


def _watermark(plan: AppendPlan, before: Generation | None, latest: Sequence[int]) -> int:
    """Return the new watermark: the given one, or a time after the latest event; it never decreases."""
    if plan.watermark is not None:
        return plan.watermark
    return max([*(time + 1 for time in latest), *([before.manifest.watermark] if before else [])])


# The result of an append to a store of histories.


@dataclass(frozen=True)
class AppendSummary:
    """The result of an append.

    Attributes:
      generation: The number of the generation that it made.
      events: Events that it read.
      left_out: Bad records that it skipped.
      users: Users in the store after it.
      total_events: Events in the store after it.
      watermark: The store's watermark after it.
      bytes: Bytes of stripes that it wrote.
      index_bytes: Bytes of indexes that it wrote.
      seconds: How long it took.
    """

    generation: int
    events: int
    left_out: int
    users: int
    total_events: int
    watermark: int
    bytes: int
    index_bytes: int
    seconds: float

    @classmethod
    def of(cls, manifest: HistoryManifest, events: int, left_out: int, started: float) -> AppendSummary:
        """Summarise an append that `started` at this `time.perf_counter` and made a generation."""
        shards = manifest.shards
        return cls(
            manifest.generation,
            events,
            left_out,
            sum(shard.users for shard in shards),
            sum(shard.events for shard in shards),
            manifest.watermark,
            sum(shard.bytes for shard in shards),
            sum(shard.index_bytes for shard in shards),
            time.perf_counter() - started,
        )


Data = str | os.PathLike[str]


def _open(
    store: Path,
    files: Sequence[Data],
    spec: HistorySpec,
    connection: DuckDBPyConnection,
    *,
    prepared: bool,
) -> PreparedSource | EventSource | TableSource:
    if prepared:
        return PreparedSource(files, spec.table())
    paths = [file.path for file in find_files(files, spec.table())]
    if is_event_file(paths[0]):
        return EventSource(paths, store)
    return TableSource(files, spec.table(), connection)


def append_history(
    store: Data,
    data: Data | Sequence[Data],
    spec: HistorySpec | None = None,
    *,
    watermark: int | None = None,
    on_bad: str = "raise",
    memory_limit: int | None = None,
    progress: Progress = no_progress,
) -> AppendSummary:
    """Append events to a store of histories, as its next generation.

    Events are divided by user, ordered by time, and written as new stripes; an index names them and those of
    earlier generations, whose files don't change. The new events are born in this generation, so the
    histories of earlier generations can be rebuilt from this one despite late events. Equal events are all
    kept, but a file that an earlier append has read is refused, and so are two equal files. The order of the
    input doesn't matter: events with the same user and time are ordered by their columns' values.

    Args:
      store: The store's folder; it is made by the first append.
      data: Files, folders or patterns of CSV, Parquet or JSON lines; or prepared data sets, or splits of
        them such as ``"clicks/train"``, whose rows are events; or files that `gmeta.io.RecentHistories`
        wrote.
      spec: The description of the columns; the first append of tables needs it. None: the spec of the first
        append or, in the first append, the task, the time and all columns of a prepared data set.
      watermark: A time before which no more events are expected. None: after the latest event so far.
      on_bad: ``"raise"`` ends the run at the first bad record; ``"skip"`` counts each and leaves it out.
      memory_limit: Bytes of memory for reading. None: half of the available memory. In addition, a shard's
        new events must fit in memory.
      progress: Called with the progress of the stages ``"read"`` and ``"write"``.

    Returns:
      A summary of the append.

    Raises:
      ConfigError: There is no spec, it isn't the store's or doesn't fit the table, or the watermark would
        decrease.
      DataError: A file can't be read, a record is bad, an append has read the file before, two files with
        records are equal, or the store is damaged.
      GmetaError: The store can't be written, or another process writes to it.

    Example:
      >>> spec = HistorySpec("user", "ts")
      >>> append_history("histories", "day-1/*.parquet", spec).generation  # doctest: +SKIP
      1
      >>> append_history("histories", "day-2/*.parquet").generation  # doctest: +SKIP
      2
    """
    started, store, bad = time.perf_counter(), Path(store), BadRecords(check_on_bad(on_bad))
    settle_or_warn(store)
    files = [data] if isinstance(data, str | os.PathLike) else list(data)
    prepared = any(map(is_prepared, files))
    if spec is None and prepared and not current_generation(store):
        spec = HistorySpec.of_prepared(files[0])
    chosen = choose_spec(store, spec)
    with closing(duckdb_engine.connect(memory_limit or memory.default_limit())) as connection:
        source = _open(store, files, chosen, connection, prepared=prepared)
        paths = [file.path for file in source.files]
        refuse_equal(paths, lambda path: prepared or holds_records(path, chosen.csv))
        plan = plan_append(store, chosen, source.spec, watermark)
        with new_generation(store, plan.before) as (_, folder):
            spill = EventSpill(folder, len(plan.spec.all_columns), plan.spec.shards)
            source.start_digests()
            for rows in source.chunks(bad, progress):
                spill.add(event_words(plan.spec, rows))
            if not spill.events:
                raise DataError("every record in it is bad", path=source.path)
            inputs = source.digests()
            refuse_known(store, inputs, [] if prepared else paths, chosen.csv)
            before, shards, done = plan.open_before(), [], 0
            for number in range(plan.spec.shards):
                shards.append(append_shard(plan, before, folder, number, spill.take(number)))
                done += shards[-1].events
                progress("write", done, spill.events)
            manifest = finish_append(plan, folder, shards, inputs)
    return AppendSummary.of(manifest, spill.events, sum(bad.counts.values()), started)
