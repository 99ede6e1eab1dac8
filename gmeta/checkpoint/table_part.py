"""Saves this rank's part of a table in a sharded checkpoint, and the admission state of ids without a row.

Exact counts of admission belong to keys, and therefore to logical shards, as rows do. A filter belongs to one
of the table's own shards, which holds the keys of several logical shards. If several ranks own parts of that
shard, each rank saves its own filter for it, and a load (`load_admission`) uses the larger of their counters.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.checkpoint.chain import CheckpointReader
from gmeta.checkpoint.manifest import (
    FILE_NAME,
    FULL,
    INCREMENT,
    FilterLayout,
    Manifest,
    Part,
    SegmentFile,
    TableEntry,
)
from gmeta.checkpoint.record_file import (
    RecordFileWriter,
    filter_schema,
    removed_schema,
    rows_schema,
    waiting_schema,
)
from gmeta.core.errors import ConfigError, GmetaError
from gmeta.core.shares import LOGICAL_SHARDS, owned_shards
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.records import AdmissionState
from gmeta.policies import CountAdmission, TwoPrecisions

Arrays = Mapping[str, npt.NDArray[Any]]

_ROWS_AT_A_TIME = 4096
_SHARDS_AT_A_TIME = 16  # the logical shards of one of the engine's 64 shards: one scan of its index


@dataclass(frozen=True)
class Baseline:
    """Checkpoint to which a table's journal and last steps relate.

    Attributes:
      id: The checkpoint's id.
      step: The table's step when the checkpoint was saved.
      shards: The logical shards of the checkpoint that the table held.
      epoch: The table's ``journal_epoch`` since then.
    """

    id: str
    step: int
    shards: range
    epoch: int


baselines: WeakKeyDictionary[HashTable, Baseline] = WeakKeyDictionary()
"""Table -> the checkpoint that this process last saved it to or loaded it from."""


def layout(table: HashTable) -> dict[str, Any]:
    """Return the settings in which a table and a checkpoint must agree."""
    optimizer = table.optimizer
    return {
        "dim": table.dim,
        "optimizer": optimizer.kind,
        "slots": tuple(optimizer.slots),
        "slot_floats": optimizer.slot_floats(table.dim),
    }


def save_table(
    folder: Path,
    name: str,
    table: HashTable,
    *,
    rank: int,
    world_size: int,
    base: Manifest | None,
    journal: int,
) -> tuple[TableEntry, int]:
    """Write this rank's part of a table.

    Args:
      folder: The checkpoint's staging folder.
      name: The table's name in the checkpoint.
      table: The table.
      rank: This rank.
      world_size: How many ranks save.
      base: The checkpoint to continue, or None.
      journal: How many removed keys the table records from now on.

    Returns:
      The table's entry with this rank's part alone, and the table's step when the save began.

    Raises:
      ConfigError: The table holds keys of shards that this rank doesn't own.
      GmetaError: The journal broke in the middle of an incremental save.
    """
    shards = owned_shards(rank, world_size)
    reason = "" if base is None else _why_full(name, table, base, shards)
    increment = base is not None and not reason
    since = baselines[table].step if increment else 0
    if not increment:  # before anything is read, so that the journal misses no later removal
        baselines.pop(table, None)
        table.start_journal(journal)
    place = folder / _folder_of(name)
    place.mkdir(exist_ok=True)
    suffix = f"{rank:05d}-of-{world_size:05d}.arrow"
    described = {f"gmeta.{key}": json.dumps(value) for key, value in {"table": name, **layout(table)}.items()}
    filters = filter_layout(table)
    schemas = {"rows": rows_schema(table.dim, layout(table)["slot_floats"]), "waiting": waiting_schema()}
    if increment:
        schemas["removed"] = removed_schema()
    if filters is not None:
        schemas["filter"] = filter_schema()
        described["gmeta.filter"] = json.dumps(asdict(filters))
    with ExitStack() as stack:
        files = {
            part: stack.enter_context(RecordFileWriter(place / f"{part}-{suffix}", schema, described))
            for part, schema in schemas.items()
        }
        live, steps = _write(table, shards, since, files)
        if filters is not None:
            write_filters(table, filters, shards, files["filter"])
    if increment and not bool(table.journal_whole()):
        raise GmetaError(
            f"table {name!r} was imported into, or its journal overflowed, while it was saved: save again, "
            "that will be a full save"
        )
    refuse_foreign(name, table, rank, shards)
    part = Part(
        rank=rank,
        first_shard=shards.start,
        last_shard=shards.stop,
        kind=INCREMENT if increment else FULL,
        since=since,
        step=steps[-1],
        live=tuple(live),
        rows=_file(folder, files["rows"]),
        **{
            kind: _file_or_none(folder, files[kind])
            for kind in ("removed", "waiting", "filter")
            if kind in files
        },
        reason=reason,
        step_times=tuple(np.ravel([] if table.step_times is None else table.step_times).tolist()),
    )
    settings = {
        "optimizer": repr(table.optimizer),
        "initializer": repr(table.initializer),
        "seed": table.seed,
        "admission": repr(table.admission),
        **_settings_of(table.precision),
        **(table.merged_keys.to_json() if table.merged_keys is not None else {}),
    }
    return TableEntry(**layout(table), settings=settings, filter=filters, parts=(part,)), steps[0]


def _settings_of(precision: TwoPrecisions | None) -> dict[str, Any]:
    if precision is None:
        return {}
    cooling = {} if precision.half_life is None else {"half_life": precision.half_life}
    return {"half_below": precision.threshold, **cooling, "rounding": precision.rounding}


def _folder_of(name: str) -> str:
    """Name a table's folder in a checkpoint. No table name can clash with other parts of the checkpoint."""
    quoted = urllib.parse.quote(name, safe=" +@")
    if quoted.startswith((".", "part-")) or quoted in ("dense", FILE_NAME):
        return f"%{ord(quoted[0]):02X}{quoted[1:]}"
    return quoted or "%"


def _why_full(name: str, table: HashTable, base: Manifest, shards: range) -> str:
    """Explain why an increment on ``base`` isn't possible; empty if it is."""
    baseline = baselines.get(table)
    if name not in base.tables:
        return "the base doesn't have this table"
    if baseline is None:
        return "this process has neither saved nor loaded the table before, or its keys have changed since"
    if baseline.id != base.id:
        return "the table was last saved to or loaded from another checkpoint than the base"
    if baseline.shards != shards:
        return "this rank held other logical shards at the base"
    if baseline.epoch != table.journal_epoch or not bool(table.journal_whole()):
        return "no journal since the base: it was off, it overflowed, or the table was imported into"
    return ""


def _write(
    table: HashTable, shards: range, since: int, files: Mapping[str, RecordFileWriter]
) -> tuple[list[int], list[int]]:
    """Write all ranges; return the live rows of each shard, and the table's step at each range."""
    live: list[int] = []
    steps: list[int] = []
    for first, range_ in export_ranges(table, shards, since):
        columns = {
            "key": range_["keys"],
            "weights": range_["rows"],
            "slots": range_["slots"],
            "frequency": range_["frequency"].astype(np.uint32),
            "last_step": range_["last_step"].astype(np.uint32),
        }
        _write_shards(files["rows"], first, range_["row_splits"], columns)
        if "removed" in files:
            _write_shards(files["removed"], first, range_["removed_splits"], {"key": range_["removed"]})
        counts = {"key": range_["waiting"], "count": range_["waiting_counts"].astype(np.uint32)}
        _write_shards(files["waiting"], first, range_["waiting_splits"], counts)
        live += range_["live"].tolist()
        steps.append(int(range_["step"]))
    return live, steps


def export_ranges(table: HashTable, shards: range, since: int = 0) -> Iterator[tuple[int, Arrays]]:
    """Export short ranges of shards; each is exported while the caller writes the previous one.

    Args:
      table: The table.
      shards: The logical shards.
      since: Skip rows whose last step is below it.

    Yields:
      The first logical shard of a range, and the fields of `gmeta.ops.table.records.ShardRecords` as arrays.
    """

    def export(first: int) -> Arrays:
        last = min(shards.stop, (first // _SHARDS_AT_A_TIME + 1) * _SHARDS_AT_A_TIME)
        with tf.device("CPU"):
            part = table.export_shards(first, last, since)
        # np.asarray shares the tensor's memory; .numpy() would copy it.
        return {field: np.asarray(value) for field, value in part._asdict().items()}

    firsts = [first for first in shards if first == shards.start or first % _SHARDS_AT_A_TIME == 0]
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(export, firsts[0])
        for first, after in zip(firsts, [*firsts[1:], None], strict=True):
            ready = coming.result()
            if after is not None:
                coming = ahead.submit(export, after)
            yield first, ready
            del ready


def _write_shards(file: RecordFileWriter, first: int, splits: npt.NDArray[Any], columns: Arrays) -> None:
    for place in np.flatnonzero(np.diff(splits)).tolist():
        begin, end = splits[place], splits[place + 1]
        file.write(first + place, {name: values[begin:end] for name, values in columns.items()})


def refuse_foreign(name: str, table: HashTable, rank: int, shards: range) -> None:
    """Refuse keys of other ranks' shards, which would be lost silently.

    Raises:
      ConfigError: The table holds such keys.
    """
    outside = 0
    for first, last in ((0, shards.start), (shards.stop, LOGICAL_SHARDS)):
        if first < last:
            found = table.export_shards(first, last, 2**32 - 1)
            outside += int(np.sum(np.asarray(found.live))) + int(found.waiting.shape[0])
    refuse_foreign_counts(name, table, rank, shards)
    if outside:
        raise ConfigError(
            f"table {name!r} of rank {rank} holds {outside} keys of logical shards outside "
            f"[{shards.start}, {shards.stop}), which other ranks save: route keys by their logical shard, or "
            "save with world_size=1"
        )


def _file(folder: Path, written: RecordFileWriter) -> SegmentFile:
    return SegmentFile(written.path.relative_to(folder).as_posix(), written.bytes, tuple(written.segments))


def _file_or_none(folder: Path, written: RecordFileWriter) -> SegmentFile | None:
    """Describe a written file; if it is empty, delete it and return None."""
    if written.segments:
        return _file(folder, written)
    written.path.unlink()
    return None


_COUNTS_AT_A_TIME = 65536


def filter_layout(table: HashTable) -> FilterLayout | None:
    """Describe the layout of a table's filter; None if its admission has no filter."""
    admission = table.admission
    if not isinstance(admission, CountAdmission) or admission.filter is None:
        return None
    nothing = table.export_filter(0, 0)
    return FilterLayout(int(nothing.count), int(nothing.counters.shape[1]), admission.filter.hashes)


def write_filters(table: HashTable, layout: FilterLayout, shards: range, file: RecordFileWriter) -> None:
    """Write the filters that cover some logical shards, one at a time; skip filters that are all zero."""
    for number in layout.filters_of(shards):
        counters = _counters(table, number)
        if counters.any():
            file.write(number * layout.width, {"counter": counters})


def refuse_foreign_counts(name: str, table: HashTable, rank: int, shards: range) -> None:
    """Refuse a filter that has counted keys of other ranks' shards: the save would lose these counts.

    Raises:
      ConfigError: The filter has such counts.
    """
    layout = filter_layout(table)
    own = layout.filters_of(shards) if layout is not None else range(0)
    for number in range(layout.shards if layout is not None else 0):
        if number not in own and _counters(table, number).any():
            raise ConfigError(
                f"table {name!r} of rank {rank} has counted ids of logical shards outside [{shards.start}, "
                f"{shards.stop}), which other ranks save: route keys by their logical shard, or save with "
                "world_size=1"
            )


def load_admission(reader: CheckpointReader, name: str, table: HashTable, shards: range) -> tuple[int, str]:
    """Load the admission state of some logical shards into a table without admission state.

    Exact counts can be loaded into exact counts or into a filter. A filter can be loaded only into a filter
    of the same layout.

    Returns:
      The number of keys with exact counts that were loaded, and the reason why the saved state couldn't be
      loaded, which is empty if it was loaded or if this table's admission doesn't refuse ids by count.

    Raises:
      DataError: A file is missing or damaged.
    """
    admission = table.admission
    if not isinstance(admission, CountAdmission):
        return 0, ""
    nothing = np.empty(0, np.int64)
    waiting = 0
    for keys, counts in read_waiting(reader, name, shards):
        waiting += len(keys)
        table.import_admission(AdmissionState(keys, counts, np.empty(0, np.uint8)), replace=False)
    entry, own = reader.manifest.tables[name], filter_layout(table)
    if entry.filter is None:
        return waiting, ""
    if own != entry.filter:
        return waiting, _why_forgotten(str(entry.settings.get("admission")), admission, entry.filter, own)
    for number in own.filters_of(shards):
        counters = reader.read_filter(name, number)
        if counters is not None:
            state = AdmissionState(nothing, nothing, counters)
            table.import_admission(state, replace=False, first_filter=number)
    return waiting, ""


def _why_forgotten(
    saved_with: str, admission: CountAdmission, saved: FilterLayout, own: FilterLayout | None
) -> str:
    def in_words(layout: FilterLayout) -> str:
        return f"{layout.shards} filters of {layout.counters} counters, {layout.hashes} an id"

    to_fill = "exact counts, which a filter can't give" if own is None else in_words(own)
    advice = (
        "make it with the saved capacity and error, and the eviction bound, to keep them"
        if own is not None
        else f"make it with admission {saved_with} to keep them"
    )
    return (
        f"it was saved with {saved_with} ({in_words(saved)}), but the table to fill has {admission} "
        f"({to_fill}); {advice}"
    )


def _counters(table: HashTable, number: int) -> npt.NDArray[np.uint8]:
    with tf.device("CPU"):
        return np.asarray(table.export_filter(number, number + 1).counters)[0]


def read_waiting(
    reader: CheckpointReader, name: str, shards: range
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Read keys and counts, some logical shards at a time."""
    saved = {
        segment.shard
        for part in reader.manifest.tables[name].parts
        if part.waiting is not None
        for segment in part.waiting.segments
    }
    found: list[dict[str, npt.NDArray[Any]]] = []
    for shard in sorted(saved.intersection(shards)):
        found.append(reader.read_waiting(name, shard))
        if sum(len(columns["key"]) for columns in found) >= _COUNTS_AT_A_TIME:
            yield _join(found)
            found = []
    if found:
        yield _join(found)


def _join(found: list[dict[str, npt.NDArray[Any]]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    keys, counts = (np.concatenate([columns[name] for columns in found]) for name in ("key", "count"))
    return keys, counts.astype(np.int64)
