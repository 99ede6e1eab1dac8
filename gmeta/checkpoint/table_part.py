"""Saves this rank's part of a table in a sharded checkpoint."""

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

from gmeta.checkpoint.admission import filter_layout, refuse_foreign_counts, write_filters
from gmeta.checkpoint.manifest import FILE_NAME, FULL, INCREMENT, Manifest, Part, SegmentFile, TableEntry
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
from gmeta.policies import TwoPrecisions

Arrays = Mapping[str, npt.NDArray[Any]]

_ROWS_AT_A_TIME = 4096
_SHARDS_AT_A_TIME = 16  # the logical shards of one of the engine's 64 shards, whose index is then walked once


@dataclass(frozen=True)
class Baseline:
    """Checkpoint to which a table's journal and last steps relate.

    Attributes:
      id: The checkpoint's id.
      step: The table's step when the checkpoint was saved.
      shards: The logical shards of the checkpoint that the table held.
    """

    id: str
    step: int
    shards: range


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
      journal: How many removed keys the table notes from now on.

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
    if not bool(table.journal_whole()):
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
    """Export short ranges of shards; the next range is exported while the caller writes one.

    Args:
      table: The table.
      shards: The logical shards.
      since: Leave out rows whose last step is below it.

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
