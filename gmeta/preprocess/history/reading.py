"""Reads a generation of a store: writes its events into tables, rebuilds histories, and checks every byte."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import resumable_folder, sync
from gmeta.core.history_manifest import BIRTH, HistoryManifest, user_shards
from gmeta.preprocess.config import Progress, no_progress
from gmeta.preprocess.history.generation import Generation, find_left, find_strange, settle, settle_or_warn
from gmeta.preprocess.history.shard_reader import (
    REQUEST,
    Histories,
    Index,
    ShardReader,
    as_floats,
    read_stripe,
)
from gmeta.preprocess.history.shard_writer import count_events, owners
from gmeta.preprocess.tables.table_files import sha256

SPEC = "_spec.toml"
_ALL = np.iinfo(np.int64)
_EVENTS = 1 << 18  # events that are in memory at once, unless one user has more

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ExportSummary:
    """The result of an export.

    Attributes:
      generation: The generation that was read.
      files: The number of files of events.
      users: Users with events in these files.
      events: Events in all files.
      absent: Requested users without events.
      bytes: The size of the files.
      seconds: How long it took.
    """

    generation: int
    files: int
    users: int
    events: int
    absent: int
    bytes: int
    seconds: float


def export_history(
    store: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    generation: int | None = None,
    until: int | None = None,
    users: npt.ArrayLike | None = None,
    progress: Progress = no_progress,
) -> ExportSummary:
    """Write a store's events as Parquet, one file for each shard that has events.

    A file has the columns of the user and the time; ``"born"``, the generation that first held the event; and
    all others, as int64 and float32. Text is exported as the store's hashes. Rows are ordered by user, time
    and birth. In addition, ``_spec.toml`` holds the store's groups: with it, an append of the files of a
    store of one generation makes a store with the same histories. (With several generations, the append gives
    all events the same birth, so events at the same time needn't stay in the order of their births.)

    Args:
      store: The store's folder.
      out: The folder to make, which appears whole or not at all.
      generation: The generation to read; None: the newest.
      until: Write only events before this time.
      users: Write only events of these users: any number of int64 values.
      progress: Called with the progress of the stage ``"write"``, in events of whole shards.

    Returns:
      A summary of the export.

    Raises:
      DataError: There is no such store or generation, or it is damaged.
      GmetaError: ``out`` exists and isn't an empty folder, or can't be written.

    Example:
      >>> export_history("histories", "events", users=[17]).events  # doctest: +SKIP
      412
    """
    started, out = time.perf_counter(), Path(out)
    settle_or_warn(Path(store))
    opened = Generation(Path(store), generation)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GmetaError(f"{out} exists already: name a folder that is to be made")
    chosen = None if users is None else np.unique(np.asarray(users, np.int64))
    total, read, found = sum(shard.events for shard in opened.manifest.shards), 0, np.zeros(2, np.int64)
    with resumable_folder(out, resume=False) as folder:
        for number, shard in enumerate(opened.manifest.shards):
            with closing(opened.open(number)) as reader:
                parts = _read(opened.manifest, reader, chosen, until)
                found += _write(folder / f"shard-{number:05d}.parquet", parts)
            read += shard.events
            progress("write", read, total)
        (folder / SPEC).write_text(_toml(opened.manifest))
        sync(folder / SPEC)
        sizes = [path.stat().st_size for path in folder.glob("*.parquet")]
        sync(folder)
    absent = 0 if chosen is None else len(chosen) - int(found[0])
    seconds = time.perf_counter() - started
    return ExportSummary(
        opened.manifest.generation, len(sizes), int(found[0]), int(found[1]), absent, sum(sizes), seconds
    )


def _read(
    manifest: HistoryManifest, reader: ShardReader, chosen: Ints | None, until: int | None
) -> Iterator[pa.Table]:
    """Yield a shard's events, of some users at a time."""
    for users in _parts(reader.index(), chosen):
        requests = np.zeros(len(users), REQUEST)
        requests["user"], requests["start"], requests["generation"] = users, _ALL.min, _ALL.max
        requests["until"] = _ALL.max if until is None else until
        columns: dict[str, NDArray[np.int64] | NDArray[np.float32]] = {}
        for group, own in enumerate(manifest.groups.values()):
            found = reader.scan(requests, range(2 + len(own)), group=group, longest=_ALL.max)
            if not columns:
                lengths = np.diff(found.row_splits)
                columns[manifest.spec["user"]] = np.repeat(users, lengths)
                columns |= dict(zip([manifest.spec["time"], BIRTH], found.columns[:2], strict=True))
            for column, values in zip(own, found.columns[2:], strict=True):
                columns[column.name] = as_floats(values) if column.dtype == "float32" else values
        if lengths.any():
            yield pa.table(columns)


def _parts(index: Index, chosen: Ints | None) -> Iterator[Ints]:
    """Cut a shard's users, ascending, into parts of at most `_EVENTS` events or one user."""
    users, counts = index.users, count_events(index)
    if chosen is not None:
        kept = np.isin(users, chosen)
        users, counts = users[kept], counts[kept]
    part = np.cumsum(counts) // _EVENTS
    if len(users):
        yield from np.split(users, np.flatnonzero(np.diff(part)) + 1)


def _write(path: Path, parts: Iterator[pa.Table]) -> tuple[int, int]:
    """Write a file of row groups, if there is any, and return its users and events."""
    writer, users, events = None, 0, 0
    try:
        for part in parts:
            writer = writer or pq.ParquetWriter(path, part.schema, compression="zstd")
            writer.write_table(part)
            users, events = users + len(part[0].unique()), events + len(part)
    finally:
        if writer is not None:
            writer.close()
    if writer is not None:
        sync(path)
    return users, events


def _toml(manifest: HistoryManifest) -> str:
    """Return the spec with which an append reads the files."""

    def text(value: str) -> str:
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    def texts(values: Sequence[str]) -> str:
        return f"[{', '.join(map(text, values))}]"

    spec = manifest.spec
    lines = [f"user = {text(spec['user'])}", f"time = {text(spec['time'])}"]
    lines += [f"{name} = {spec[name]}" for name in ("shards", "stripe_events")]
    groups = {group: [column.name for column in own] for group, own in manifest.groups.items()}
    lines += ["", "[groups]", *(f"{text(group)} = {texts(own)}" for group, own in groups.items())]
    return "\n".join(lines) + "\n"


# Reads histories of a store by the names of columns, without TensorFlow.


class NamedHistories(NamedTuple):
    """Histories, one after another.

    Attributes:
      row_splits: (R + 1,) int64: request ``i`` has the events ``row_splits[i]`` to ``row_splits[i + 1] - 1``.
      columns: Name -> (E,) int64 or float32.
    """

    row_splits: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]


def read_histories(
    store: Generation,
    users: npt.ArrayLike,
    columns: Sequence[str],
    *,
    start: npt.ArrayLike | None = None,
    until: npt.ArrayLike | None = None,
    generation: npt.ArrayLike | None = None,
    longest: int = _ALL.max,
) -> NamedHistories:
    """Rebuild histories as they were at a moment.

    A history has the newest `longest` of the events with ``start <= time < until`` that `generation` held, in
    the order of time and birth. A user who isn't in the store has no events.

    Args:
      store: The generation to read.
      users: (R,) int64.
      columns: Names of columns of one group, the time, or ``"born"``.
      start: The earliest time of an event, one for all requests or (R,); None: no bound.
      until: The time before which all events lie, in the same form.
      generation: The newest generation whose events count, in the same form; None: the one that is read.
      longest: The largest number of events of a history.

    Raises:
      ConfigError: A column doesn't exist, or the columns are of several groups.
      DataError: The store is damaged, or a generation is later than the one that is read.

    Example:
      >>> read_histories(Generation(Path("histories")), [7], ["ts", "item"], until=1000)  # doctest: +SKIP
    """
    users, newest = np.asarray(users, np.int64), store.manifest.generation
    requests = np.zeros(len(users), REQUEST)
    requests["user"] = users
    requests["start"] = _ALL.min if start is None else start
    requests["until"] = _ALL.max if until is None else until
    requests["generation"] = newest if generation is None else generation
    later = requests["generation"] > newest
    if later.any():
        first = requests[later][0]
        raise DataError(
            f"user {first['user']}: generation {first['generation']} is requested, and this is {newest}",
            path=store.store,
            advice="open a newer generation",
        )
    group, chosen = store.manifest.find(columns)
    shard = user_shards(users, len(store.manifest.shards))
    order = np.argsort(shard, kind="stable")
    found = []
    for number in np.unique(shard).tolist():
        with closing(store.open(number)) as reader:
            own = requests[order][shard[order] == number]
            found.append(reader.scan(own, [each.number for each in chosen], group=group, longest=longest))
    splits, values = _restore(found, order, len(chosen))
    named = {
        each.name: as_floats(own) if each.dtype == "float32" else own
        for each, own in zip(chosen, values, strict=True)
    }
    return NamedHistories(splits, named)


def _restore(found: Sequence[Histories], order: NDArray[np.int64], columns: int) -> Histories:
    """Join the histories of all shards, which are in `order`, in the order of the requests."""
    lengths = np.empty(len(order), np.int64)
    lengths[order] = np.concatenate([np.empty(0, np.int64), *(np.diff(each.row_splits) for each in found)])
    row_splits = np.concatenate(([0], np.cumsum(lengths)))
    into = np.repeat(row_splits[:-1][order], lengths[order])
    own = lengths[order]
    into += np.arange(len(into)) - np.repeat(np.cumsum(own) - own, own)
    values = []
    for column in range(columns):
        joined = np.empty(len(into), np.int64)
        joined[into] = np.concatenate([np.empty(0, np.int64), *(each.columns[column] for each in found)])
        values.append(joined)
    return Histories(row_splits, values)


@dataclass(frozen=True)
class Verification:
    """The result of a check.

    Attributes:
      generation: The generation that was checked.
      stripes: Stripes that were read.
      events: Events in them, each counted once for each group.
      faults: The faults, one line each, with file, offset and user.
      left: Entries of the store that don't belong there, one line each: generations whose deletion has begun
        but that this process can't remove, and folders that aren't generations. They may hold events of
        deleted users.
      uncommitted: The remains of killed processes' generations, one line each; the next append removes them.
    """

    generation: int
    stripes: int
    events: int
    faults: tuple[str, ...]
    left: tuple[str, ...]
    uncommitted: tuple[str, ...]


def verify_history(store: Path, generation: int | None = None) -> Verification:
    """Read and check everything that a generation holds, including files of earlier generations.

    The check covers the manifest's digest; the SHA-256 of each index and of each file of stripes; for each
    stripe, the checksums of its directory and of every column, the number of its events, and that their times
    and births match the index; and that each user is in the right shard, with the same number of events in
    each group. First, it finishes a deletion that a killed process has begun.

    Args:
      store: The store's folder.
      generation: The generation to check; None: the newest.

    Raises:
      DataError: There is no such store or generation, or its manifest is damaged.
    """
    left = [*settle(store), *find_strange(store)]
    opened = Generation(store, generation)
    stripes, events, faults = 0, 0, list[str]()
    for shard in range(len(opened.manifest.shards)):
        try:
            with closing(opened.open(shard)) as reader:
                index = reader.index()
        except DataError as error:
            faults.append(str(error))
            continue
        stripes += len(index.places)
        events += int(index.places["events"].sum())
        faults += _check_index(opened, shard, index)
        wrong = list(_check_stripes(opened, shard, index))
        faults += wrong or _check_files(opened, shard)
    return Verification(
        opened.manifest.generation, stripes, events, tuple(faults), tuple(left), tuple(find_left(store))
    )


def _check_files(opened: Generation, shard: int) -> Iterator[str]:
    """Compare the checksums of files of stripes with the manifests of their generations."""
    for number, path in opened.files(shard).items():
        try:
            manifest = HistoryManifest.load(opened.store, number)
            found = sha256(path)
        except DataError as error:
            yield str(error)
            continue
        if found != manifest.shards[shard].sha256:
            yield f"{path}: its SHA-256 isn't the one in the manifest of generation {number}"


def _check_index(opened: Generation, shard: int, index: Index) -> Iterator[str]:
    where = user_shards(index.users, len(opened.manifest.shards))
    for user in index.users[where != shard].tolist():
        yield f"shard {shard}: user {user} belongs to another shard"
    owner = np.searchsorted(index.users, owners(index))
    counts = np.zeros((len(opened.manifest.groups), len(index.users)), np.int64)
    np.add.at(counts, (index.places["group"], owner), index.places["events"])
    for user in index.users[(counts != counts[:1]).any(axis=0)].tolist():
        yield f"shard {shard}: user {user} has more events in one group than in another"


def _check_stripes(opened: Generation, shard: int, index: Index) -> Iterator[str]:
    widths = [2 + len(columns) for columns in opened.manifest.groups.values()]
    files, contents = opened.files(shard), dict[int, NDArray[np.uint8]]()
    for place, user in zip(index.places, owners(index).tolist(), strict=True):
        number, offset = int(place["file"]), int(place["offset"])
        path = files.get(number)
        where = f"{path or f'generation {number}'} at byte {offset}: user {user}"
        if path is None or not path.exists():
            yield f"{where}: the file isn't there"
            continue
        if number not in contents:
            contents[number] = np.memmap(path, np.uint8) if path.stat().st_size else np.empty(0, np.uint8)
        try:
            data = contents[number][offset : offset + int(place["bytes"])].tobytes()
            columns = read_stripe(data, where=where)
        except DataError as error:
            yield str(error)
            continue
        if len(columns) != widths[int(place["group"])] or len(columns[0]) != place["events"]:
            yield f"{where}: its columns or events differ from those of the index"
            continue
        times, births = columns[:2]
        found = (times.min(), times.max(), births.min(), births.max())
        if found != tuple(place[name] for name in ("first", "last", "born_first", "born_last")):
            yield f"{where}: the times or births of its events differ from those of the index"
