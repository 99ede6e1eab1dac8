"""Sharded checkpoints of embedding tables: streamed, incremental, crash-safe, for any number of ranks.

A checkpoint is a folder::

    step-000000000200/
      manifest.json                         written last: what is where, with checksums
      item/rows-00000-of-00002.arrow        a record batch a logical shard: key, weights, slots, frequency,
      item/rows-00001-of-00002.arrow        last_step, sorted by key; a file a rank
      item/removed-00000-of-00002.arrow     in an increment: the keys that are gone
      item/waiting-00000-of-00002.arrow     keys that `CountAdmission` turns away yet, with their count
      item/filter-00000-of-00002.arrow      or its filter's counters: a batch a filter, named by the first of
                                            its logical shards
      dense/...                             what the caller adds, such as the dense weights

Any Arrow reader opens the files; `gmeta.checkpoint.CheckpointReader` reads them with NumPy.

A crash at any moment leaves what was there: all is written under a hidden name, flushed to the disk, and
renamed. Memory beyond the tables' own stays near two engine shards, a thirty-second of a table.

Which keys an increment holds: those whose last step isn't below the table's step at the save before, that is
all that were read by an inserting lookup or updated since then, and those of that very step, which may stand
in both. Removed keys come from the table's journal (`HashTable.start_journal`). A table that can't tell what
has changed (it was imported into, its journal overflowed, or it was last saved elsewhere) is saved in full;
the part's ``reason`` says why, and a reader begins there.

A save is of one moment if no batch runs meanwhile: save between two steps. If batches do run, each logical
shard is of one moment, and the next increment has all that the save missed.

What admission remembers of ids that have no row yet is in every save whole, in an increment too, since it
isn't known which counts have changed: 12 bytes an id that is counted exactly, or the bytes of the filter.
Exact counts load into any number of ranks, into another threshold, and into a filter. A filter loads into one
of the same capacity, error and eviction bound, by any number of ranks: one that divides the filters (64,
unless the bound is small) changes nothing; otherwise two ranks may have counted in one filter, and the larger
of their counters is taken, so that no id is admitted later than it would have been, and none earlier than if
one rank had counted all. What can't be taken over is told by a warning and in `CheckpointInfo.forgotten`;
these ids are then counted afresh.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gmeta.checkpoint.files import folder as folders
from gmeta.checkpoint.files.chain import CheckpointReader, crc32_of
from gmeta.checkpoint.files.manifest import FULL, INCREMENT, Manifest, OtherFile, TableEntry
from gmeta.checkpoint.files.rank_group import Gather, Ranks
from gmeta.checkpoint.table_part import Baseline, baselines, check_layout, load_table, save_table
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import write_atomically
from gmeta.core.logical_shards import owned_shards
from gmeta.ops.table.hash_table import HashTable

Tables = Mapping[str, HashTable]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that was saved or loaded.

    Attributes:
      folder: Where it is.
      id: Unlike any other checkpoint's.
      kinds: Table -> ``"full"`` or ``"increment"``, for this rank.
      rows: Table -> how many records this rank wrote or read.
      waiting: Table -> how many ids that wait for admission, with exact counts, it wrote or read.
      bytes: Of records that this rank wrote or read.
      seconds: How long it took.
      reasons: Table -> why it was saved in full although a base was given.
      metadata: The caller's.
      forgotten: Table -> why what admission remembered couldn't be loaded.
    """

    folder: Path
    id: str
    kinds: Mapping[str, str]
    rows: Mapping[str, int]
    waiting: Mapping[str, int]
    bytes: int
    seconds: float
    reasons: Mapping[str, str]
    metadata: Mapping[str, Any]
    forgotten: Mapping[str, str] = field(default_factory=dict)


def save(
    folder: str | os.PathLike[str],
    tables: Tables,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    base: str | os.PathLike[str] | None = None,
    journal: int = 0,
    dense: Callable[[Path], None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    gather: Gather | None = None,
) -> CheckpointInfo:
    """Save tables, each rank the logical shards that it owns. All ranks call it together.

    Args:
      folder: The checkpoint to make; its parent is made if it is missing. All ranks name the same folder, in
        a file system that they share.
      tables: Name -> this rank's table. All ranks name the same tables.
      rank: This rank; it saves the shards of `gmeta.core.logical_shards.owned_shards`. By default that of
        `gmeta.core.collectives.world`.
      world_size: How many ranks save; likewise.
      base: The checkpoint before, a folder beside this one: only what changed since then is saved, and this
        one needs it to be loaded. It must be the one that these tables were last saved to or loaded from,
        with a journal; a table for which it isn't is saved in full.
      journal: About how many removed keys a table notes from now on, 8 bytes each, so that the next save can
        continue this one; 0: it can't.
      dense: Called by rank 0 with an empty folder inside the checkpoint, to write what isn't in the tables.
      metadata: JSON values to keep in the manifest.
      gather: Gives every rank's object to every rank, by rank; needed if these aren't the job's ranks, which
        have `gmeta.core.collectives.allgather_objects`.

    Returns:
      What this rank saved.

    Raises:
      ConfigError: ``folder`` is there already or another process writes it, ``base`` isn't beside it, or a
        table holds keys of shards that this rank doesn't own.
      DataError: ``base`` is not a whole checkpoint, or a rank saved nothing.
      GmetaError: The disk is full, or the folder can't be written. What was saved before is whole. What fails
        on one rank is raised by all, with its number.
      CollectiveError: Another rank has ended.

    Example:
      ::

        save("ckpt/a", {"item": table}, journal=1_000_000)
        ...                                                    # train
        save("ckpt/b", {"item": table}, base="ckpt/a", journal=1_000_000)
        load("ckpt/b", {"item": fresh_table})
    """
    started = time.perf_counter()
    target, ranks = Path(folder).resolve(), Ranks.of(rank, world_size, gather)
    shards = owned_shards(ranks.rank, ranks.size)
    if ranks.gather is None and ranks.size > 1:
        raise ConfigError(
            f"{ranks.size} ranks save together: pass gather=, which gives every rank's object to all"
        )
    with _stage(target, ranks) as staging:
        with _together(target, ranks):
            base_manifest = _check(target, tables, base)
            if ranks.rank == 0:
                folders.begin(target)
        with _together(target, ranks):
            written = {
                name: save_table(
                    staging,
                    name,
                    table,
                    rank=ranks.rank,
                    world_size=ranks.size,
                    base=base_manifest,
                    journal=journal,
                )
                for name, table in tables.items()
            }
            parts = {name: entry.to_json() for name, (entry, _) in written.items()}
            write_atomically(staging / _part_name(ranks.rank), json.dumps(parts))
        with _together(target, ranks):
            if ranks.rank == 0:
                _commit(
                    target,
                    ranks.size,
                    base_manifest,
                    None if base is None else Path(base).resolve().name,
                    dense,
                    metadata or {},
                )
    with ranks.together():
        manifest = Manifest.load(target)
    for name, table in tables.items():
        table.journal_saved()
        baselines[table] = Baseline(manifest.id, written[name][1], shards)
    own = {name: entry.parts[0] for name, (entry, _) in written.items()}
    return CheckpointInfo(
        folder=target,
        id=manifest.id,
        kinds={name: part.kind for name, part in own.items()},
        rows={name: sum(segment.rows for segment in part.rows.segments) for name, part in own.items()},
        waiting={name: entry.waiting for name, (entry, _) in written.items()},
        bytes=sum(file.bytes for part in own.values() for file in part.files),
        seconds=time.perf_counter() - started,
        reasons={name: part.reason for name, part in own.items() if part.reason},
        metadata=manifest.metadata,
    )


def load(
    folder: str | os.PathLike[str],
    tables: Tables,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    journal: int = 0,
    gather: Gather | None = None,
) -> CheckpointInfo:
    """Load tables, each rank the logical shards that it owns; it reads no others.

    The job's ranks call it together; ranks that are named without ``gather`` load each for itself.

    Args:
      folder: The checkpoint. Those that it continues lie beside it.
      tables: Name -> the table to fill; what it held is replaced. Tables of the checkpoint that aren't named
        are left alone.
      rank: This rank; by default that of `gmeta.core.collectives.world`.
      world_size: How many ranks load; likewise, and it may be another number than saved.
      journal: As for `save`: so that the next save can be an increment on this checkpoint.
      gather: As for `save`; with it, what fails on one rank is raised by all.

    Returns:
      What this rank loaded.

    Raises:
      ConfigError: A table has another width or optimizer than was saved.
      DataError: The checkpoint lacks a table, or is damaged. The tables' content is then undefined: load
        another checkpoint.
    """
    started, path = time.perf_counter(), Path(folder).resolve()
    ranks = Ranks.of(rank, world_size, gather)
    shards = owned_shards(ranks.rank, ranks.size)
    with ranks.together(), CheckpointReader(path) as reader:
        for name, table in tables.items():
            check_layout(reader, name, table)
        found = {name: load_table(reader, name, table, shards) for name, table in tables.items()}
    forgotten = {name: why for name, (_, _, why) in found.items() if why}
    for name, why in forgotten.items():
        warnings.warn(
            f"{path}: what the admission of table {name!r} remembered is left out, so that ids without a row "
            f"are counted afresh: {why}",
            stacklevel=2,
        )
    for name, table in tables.items():
        table.start_journal(journal)
        baselines[table] = Baseline(reader.manifest.id, reader.manifest.tables[name].step, shards)
    return CheckpointInfo(
        folder=path,
        id=reader.manifest.id,
        kinds=dict.fromkeys(tables, FULL),
        rows={name: rows for name, (rows, _, _) in found.items()},
        waiting={name: waiting for name, (_, waiting, _) in found.items()},
        bytes=reader.bytes_read,
        seconds=time.perf_counter() - started,
        reasons={},
        metadata=reader.manifest.metadata,
        forgotten=forgotten,
    )


@contextmanager
def _together(target: Path, ranks: Ranks) -> Iterator[None]:
    with ranks.together(), folders.explain_checkpoint_errors(target):
        yield


@contextmanager
def _stage(target: Path, ranks: Ranks) -> Iterator[Path]:
    """Where the ranks write, locked by rank 0 against other processes; what isn't finished is removed."""
    lock, staging = folders.lock_of(target), folders.staging_of(target)
    with _together(target, ranks):
        if ranks.rank == 0:
            lock.take()
    try:
        yield staging
    except BaseException:
        if ranks.rank == 0:  # no rank writes any more: what fails on one has failed on all
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        lock.release()


def _check(target: Path, tables: Tables, base: str | os.PathLike[str] | None) -> Manifest | None:
    if target.exists():
        raise ConfigError(f"{target} is there already: a checkpoint isn't written over; choose another name")
    if not tables:
        raise ConfigError("no tables to save")
    if base is None:
        return None
    if Path(base).resolve().parent != target.parent:
        raise ConfigError(f"base must lie beside {target}, got {os.fspath(base)}")
    return Manifest.load(Path(base))


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _commit(
    target: Path,
    world_size: int,
    base: Manifest | None,
    base_name: str | None,
    dense: Callable[[Path], None] | None,
    metadata: Mapping[str, Any],
) -> None:
    """Rank 0's last steps: gather what the ranks wrote, write the manifest, give the folder its name."""
    staging = folders.staging_of(target)
    files = {}
    if dense is not None:
        (staging / "dense").mkdir()
        dense(staging / "dense")
        for path in sorted(p for p in (staging / "dense").rglob("*") if p.is_file()):
            files[path.relative_to(staging).as_posix()] = OtherFile(path.stat().st_size, crc32_of(path))
    entries: dict[str, list[TableEntry]] = {}
    for rank in range(world_size):
        path = staging / _part_name(rank)
        if not path.exists():
            raise DataError(f"rank {rank} of {world_size} has saved nothing", path=path)
        for name, value in json.loads(path.read_bytes()).items():
            entries.setdefault(name, []).append(TableEntry.from_json(value))
        path.unlink()
    tables = {}
    for name, ranks in entries.items():
        if len(ranks) != world_size or any(
            replace(e, parts=()) != replace(ranks[0], parts=()) for e in ranks
        ):
            raise ConfigError(f"table {name!r} isn't the same table on all {world_size} ranks")
        tables[name] = replace(ranks[0], parts=tuple(entry.parts[0] for entry in ranks))
    continues = base is not None and any(part.kind == INCREMENT for t in tables.values() for part in t.parts)
    Manifest(
        id=uuid.uuid4().hex,
        base=base_name if continues else None,
        base_id=base.id if base is not None and continues else None,
        world_size=world_size,
        metadata=metadata,
        files=files,
        tables=tables,
    ).save(staging)
    folders.commit(target)
