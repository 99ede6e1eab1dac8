"""Appends events of tables to a store of histories."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta.core.data.history_manifest import HistoryManifest, current_generation
from gmeta.core.data.on_bad import check_on_bad
from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.history.files.event_spill import EventSpill
from gmeta.preprocess.history.files.generation import Generation, generations, new_generation
from gmeta.preprocess.history.files.shard_writer import read_earlier, write_shard
from gmeta.preprocess.history.files.stripe_layout import find_joined
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.local import duckdb_engine, memory
from gmeta.preprocess.progress import Progress, no_progress
from gmeta.preprocess.tables.table_source import TableSource

Data = str | os.PathLike[str]


@dataclass(frozen=True)
class AppendSummary:
    """What an append did.

    Attributes:
      generation: The number of the generation that it made.
      events: Events that it read.
      left_out: Bad records that it left out.
      users: Users of the store now.
      total_events: Events of the store now.
      watermark: The store's watermark now.
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

    Events are divided by user, ordered by time, and written as new stripes; an index names them beside those
    of earlier generations, whose files stay as they are. The new events are born in this generation, so the
    histories of earlier generations can be rebuilt from this one, whatever arrives late. Equal events are all
    kept, but a file that an earlier append has read is refused. The order of the input doesn't matter: events
    of one user and one time are in the order of their columns' values.

    Args:
      store: The store's folder; it is made by the first append.
      data: Files, folders or patterns of CSV, Parquet or JSON lines.
      spec: The description of the columns; the first append needs it. None: what the first append was given.
      watermark: A time before which no more events are expected. None: behind the latest event so far.
      on_bad: ``"raise"`` ends the run at the first bad record; ``"skip"`` counts each and leaves it out.
      memory_limit: Bytes of memory for reading. None: half of the available memory. A shard's new events must
        fit in memory besides.
      progress: Called with the progress of the stages ``"read"`` and ``"write"``.

    Returns:
      What was done.

    Raises:
      ConfigError: There is no spec, or it isn't the store's; or it doesn't fit the table; or the watermark
        would go back.
      DataError: A file can't be read, a record is bad, an append has read the file before, or the store is
        damaged.
      GmetaError: The store can't be written, or another process writes to it.

    Example:
      >>> spec = HistorySpec("user", "ts")
      >>> append_history("histories", "day-1/*.parquet", spec).generation  # doctest: +SKIP
      1
      >>> append_history("histories", "day-2/*.parquet").generation  # doctest: +SKIP
      2
    """
    started, store, bad = time.perf_counter(), Path(store), BadRecords(check_on_bad(on_bad))
    files = [data] if isinstance(data, str | os.PathLike) else list(data)
    before = Generation(store) if current_generation(store) else None
    chosen = _choose_spec(store, before, spec)
    with closing(duckdb_engine.connect(memory_limit or memory.default_limit())) as connection:
        source = TableSource(files, chosen.table(), connection)
        own = chosen.resolve(source.spec)
        if before is not None:
            _refuse_other(own.to_json(), before.manifest.spec, store)
        with new_generation(store, before.manifest.generation if before else 0) as (generation, folder):
            spill = EventSpill(folder, own.all_columns, own.shards)
            source.start_digests()
            for chunk in source.chunks(bad, progress):
                spill.add(chunk)
            if spill.latest is None:
                raise DataError("every record in it is bad", path=source.path)
            mark = _move_watermark(before, watermark, spill.latest)
            _refuse_known(store, source.digests())
            manifest = _write(folder, generation, own, spill, before, mark, source.digests(), progress)
    return AppendSummary(
        generation,
        spill.events,
        sum(bad.counts.values()),
        sum(shard.users for shard in manifest.shards),
        sum(shard.events for shard in manifest.shards),
        mark,
        sum(shard.bytes for shard in manifest.shards),
        sum(shard.index_bytes for shard in manifest.shards),
        time.perf_counter() - started,
    )


def _choose_spec(store: Path, before: Generation | None, given: HistorySpec | None) -> HistorySpec:
    if given is not None:
        return given
    if before is None:
        raise ConfigError(
            f"{store} has no events yet: name the columns of users and times, with --user and --time, or "
            "a --spec"
        )
    return HistorySpec.from_json(before.manifest.spec)


def _refuse_other(given: Mapping[str, Any], spec: Mapping[str, Any], store: Path) -> None:
    other = [name for name in spec if given[name] != spec[name]]
    if other:
        raise ConfigError(
            f"{store} was made with other {' and '.join(other)}: {other[0]} is {spec[other[0]]} there, and "
            f"not {given[other[0]]}; without a spec, an append reads columns as the first one did"
        )


def _move_watermark(before: Generation | None, given: int | None, latest: int) -> int:
    """Return the new watermark: the given one, or behind the latest event; it never goes back."""
    last = before.manifest.watermark if before else None
    if given is None:
        return latest + 1 if last is None else max(last, latest + 1)
    if last is not None and given < last:
        raise ConfigError(f"watermark {given} is earlier than {last}, that of the store")
    return given


def _refuse_known(store: Path, inputs: Mapping[str, str]) -> None:
    """Refuse files that an earlier append has read: their events would be there twice."""
    for number in generations(store):
        known = set(HistoryManifest.load(store, number).inputs.values())
        for name, digest in inputs.items():
            if digest in known:
                raise DataError(
                    f"generation {number} holds the events of {name} already",
                    path=store,
                    advice="leave the file out",
                )


def _write(
    folder: Path,
    generation: int,
    spec: HistorySpec,
    spill: EventSpill,
    before: Generation | None,
    watermark: int,
    inputs: Mapping[str, str],
    progress: Progress,
) -> HistoryManifest:
    shards, reads, done = [], set[int](), 0
    for number in range(spec.shards):
        rows, earlier = spill.take(number), read_earlier(before, number)
        written = write_shard(
            folder,
            number,
            generation,
            rows,
            spec.group_numbers,
            spec.stripe_events,
            earlier,
            find_joined(earlier.stripes, rows[:, 0], spec.stripe_events),
        )
        shards.append(written.shard)
        reads |= written.reads
        done += len(rows)
        progress("write", done, spill.events)
    manifest = HistoryManifest(
        generation,
        spec.group_columns(),
        tuple(shards),
        watermark,
        before.manifest.start if before else None,
        inputs,
        tuple(sorted(reads)),
        spec.to_json(),
    )
    manifest.save(folder)
    return manifest
