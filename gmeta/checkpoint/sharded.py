"""Sharded checkpoints of embedding tables: streamed, incremental, crash-safe, for any number of ranks.

A checkpoint is a folder::

    step-000000000200/
      manifest.json                         written last: which file holds what, with checksums
      item/rows-00000-of-00002.arrow        one file a rank, one record batch a logical shard: key, weights,
      item/rows-00001-of-00002.arrow        slots, frequency, last_step, sorted by key
      item/removed-00000-of-00002.arrow     in an increment: the removed keys
      item/waiting-00000-of-00002.arrow     keys that `CountAdmission` still turns away, with their count
      item/filter-00000-of-00002.arrow      or its filter's counters: one batch a filter, named by the first
                                            of the filter's logical shards
      dense/...                             what the caller adds, such as the dense weights

Any Arrow reader opens the files; `gmeta.checkpoint.chain.CheckpointReader` reads them with NumPy.

A crash never damages earlier checkpoints: a save writes everything under a hidden name, flushes it to the
disk, and renames it. A save takes about two engine shards of additional memory, a thirty-second of a table.

An increment contains the keys whose last step isn't below the table's step at the previous save. These are
all keys that an inserting lookup read or a gradient updated since then, and those of that step itself, which
both saves may contain. Removed keys come from the table's journal (`HashTable.start_journal`). A table
without this information (rows were imported into it, its journal overflowed, or it was last saved elsewhere)
is saved in full; the part's ``reason`` states why, and a reader starts from that part.

A save is a consistent state of the tables if no batch runs during it: save between two steps. If batches run,
each logical shard is saved at its own time, and the next increment contains all that the save missed.

Every save, even an increment, contains the entire admission state of ids without a row, since tables don't
record which counts changed: 12 bytes for an id that is counted exactly, or the bytes of the filter. Exact
counts can be loaded by any number of ranks, with a different threshold, and into a filter. A filter can be
loaded into one of the same capacity, error and eviction bound, by any number of ranks. A number of ranks that
divides the number of filters (64, unless the bound is small) changes nothing. With other numbers, two ranks
may have counted in one filter; the larger of their counters is then taken. No id is admitted later than it
would have been, and none earlier than if one rank had counted all. State that can't be loaded is reported by
a warning and in `CheckpointInfo.forgotten`; these ids are then counted afresh.
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

from gmeta.checkpoint import lock as folders
from gmeta.checkpoint.chain import CheckpointReader, crc32_of
from gmeta.checkpoint.manifest import FULL, INCREMENT, Manifest, OtherFile, TableEntry
from gmeta.checkpoint.table_load import TableLoader
from gmeta.checkpoint.table_part import Baseline, baselines, save_table
from gmeta.core.collectives.rank_group import Gather, Ranks
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import write_atomically
from gmeta.core.shares import owned_shards
from gmeta.ops.table.hash_table import HashTable

Tables = Mapping[str, HashTable]


@dataclass(frozen=True)
class CheckpointInfo:
    """Report on a checkpoint that was saved or loaded.

    Attributes:
      folder: The checkpoint's folder.
      id: Unique id of the checkpoint.
      kinds: Table -> ``"full"`` or ``"increment"``, for this rank; empty if it has saved nothing, as its rows
        are copies of those of another group.
      rows: Table -> how many records this rank wrote or read.
      waiting: Table -> how many ids, waiting for admission with exact counts, this rank wrote or read.
      bytes: Bytes of the records that this rank wrote or read.
      seconds: How long the save or load took.
      reasons: Table -> why it was saved in full although a base was given.
      metadata: The caller's metadata.
      forgotten: Table -> why its admission state couldn't be loaded.
      left: Of a load: the tables that users name, by their full names, whose rows weren't loaded.
      new: Of a load: tables that start without rows, each with the reason.
      without_slots: Of a load: tables whose optimizer is now of another kind, so that its slots are reset.
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
    left: tuple[str, ...] = ()
    new: Mapping[str, str] = field(default_factory=dict)
    without_slots: tuple[str, ...] = ()


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
    """Save tables. Each rank saves the logical shards that it owns; all ranks call it together.

    With groups of ranks (`gmeta.init`), those of the first group write, and the others wait for them.

    Args:
      folder: The checkpoint to make; a missing parent folder is made too. All ranks name the same folder, in
        a file system that they share.
      tables: Name -> this rank's table. All ranks name the same tables.
      rank: This rank; it saves the shards of `gmeta.core.shares.owned_shards`. By default the rank of
        `gmeta.core.collectives.world`.
      world_size: How many ranks save; by default that of `gmeta.core.collectives.world`.
      base: The previous checkpoint, a folder beside this one. Only what changed since then is saved, and
        loading this checkpoint needs the base. It must be the checkpoint that these tables were last saved to
        or loaded from, with a journal; other tables are saved in full.
      journal: About how many removed keys a table records from now on, 8 bytes each, so that the next save
        can be an increment on this one; 0: the next save is full.
      dense: A function that rank 0 calls with an empty folder inside the checkpoint, to write what the tables
        don't contain.
      metadata: JSON values to keep in the manifest.
      gather: Returns all ranks' objects on every rank, ordered by rank. Needed only if the ranks aren't those
        of the job; those use `gmeta.core.collectives.allgather_objects`.

    Returns:
      What this rank saved.

    Raises:
      ConfigError: ``folder`` exists already or another process writes it, ``base`` isn't beside it, or a
        table holds keys of shards that this rank doesn't own.
      DataError: ``base`` is not a whole checkpoint, or a rank saved nothing.
      GmetaError: The disk is full, or the folder can't be written. Earlier checkpoints stay whole. An error
        on one rank is raised by all ranks, with the number of that rank.
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
    shards = owned_shards(ranks.owner, ranks.owners)
    if ranks.gather is None and ranks.size > 1:
        raise ConfigError(
            f"{ranks.size} ranks save together: pass gather=, which gives every rank's object to all"
        )
    with _stage(target, ranks) as staging:
        with _together(target, ranks):
            base_manifest = _check(target, tables, base, dense)
            if ranks.rank == 0:
                folders.begin(target)
        with _together(target, ranks):
            written = {
                name: save_table(
                    staging,
                    name,
                    table,
                    rank=ranks.owner,
                    world_size=ranks.owners,
                    base=base_manifest,
                    journal=journal,
                )
                for name, table in (tables.items() if ranks.writes else ())
            }
            if ranks.writes:
                parts = {name: entry.to_json() for name, (entry, _) in written.items()}
                write_atomically(staging / _part_name(ranks.owner), json.dumps(parts))
        with _together(target, ranks):
            if ranks.rank == 0:
                _commit(
                    target,
                    ranks.owners,
                    base_manifest,
                    None if base is None else Path(base).resolve().name,
                    dense,
                    metadata or {},
                )
    with ranks.together():
        manifest = Manifest.load(target)
    for name, (_, step) in written.items():
        tables[name].journal_saved()
        baselines[tables[name]] = Baseline(manifest.id, step, shards, tables[name].journal_epoch)
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
    partial: bool = False,
) -> CheckpointInfo:
    """Load tables. Each rank reads only the logical shards that it owns.

    Rows belong to the tables that users name. If features have since been added, removed, reordered or given
    other policies, so that other tables are merged, rows get the keys that they have now. Every rank reads
    all rows of such tables, and their next save is a full one.

    The job's ranks call it together. Ranks that are given without ``gather`` load independently.

    Args:
      folder: The checkpoint. Those that it continues must lie beside it.
      tables: Name -> the table to fill; its content is replaced. Tables of the checkpoint that aren't named
        here are not loaded; ``left`` of the result has them.
      rank: This rank; by default that of `gmeta.core.collectives.world`.
      world_size: How many ranks load; by default that of `gmeta.core.collectives.world`. It may differ from
        the number that saved.
      journal: As in `save`, so that the next save can be an increment on this checkpoint.
      gather: As in `save`; with it, an error on one rank is raised by all.
      partial: Whether to load what fits: a table that the checkpoint lacks, or that has another width there,
        then starts without rows, and one whose optimizer is of another kind without slots.

    Returns:
      What this rank loaded.

    Raises:
      ConfigError: A table's width or optimizer differs from the saved one; or it hashes ids in another way.
      DataError: The checkpoint lacks a table, or is damaged, or has ids that are too large now that other
        tables are merged. The tables' content is then undefined: load another checkpoint.
    """
    started, path = time.perf_counter(), Path(folder).resolve()
    ranks = Ranks.of(rank, world_size, gather)
    shards = owned_shards(ranks.owner, ranks.owners)
    with ranks.together(), CheckpointReader(path) as reader:
        loader = TableLoader(reader, tables, partial=partial)
        for table in tables.values():
            baselines.pop(table, None)
        found = {name: loader.load(name, shards, ranks.owner, ranks.owners) for name in tables}
    forgotten = {name: each.forgotten for name, each in found.items() if each.forgotten}
    for name, why in forgotten.items():
        warnings.warn(
            f"{path}: the admission counts of table {name!r} are left out, so that ids without a row "
            f"are counted afresh: {why}",
            stacklevel=2,
        )
    for name, table in tables.items():
        table.start_journal(journal if ranks.writes else 0)
        if found[name].origin == name:  # otherwise, no increment can continue it
            step = reader.manifest.tables[name].step
            baselines[table] = Baseline(reader.manifest.id, step, shards, table.journal_epoch)
    return CheckpointInfo(
        folder=path,
        id=reader.manifest.id,
        kinds=dict.fromkeys(tables, FULL),
        rows={name: each.rows for name, each in found.items()},
        waiting={name: each.waiting for name, each in found.items()},
        bytes=reader.bytes_read,
        seconds=time.perf_counter() - started,
        reasons={},
        metadata=reader.manifest.metadata,
        forgotten=forgotten,
        left=tuple(loader.moves.left),
        new=loader.moves.fresh,
        without_slots=loader.moves.without_slots,
    )


@contextmanager
def _together(target: Path, ranks: Ranks) -> Iterator[None]:
    with ranks.together(), folders.explain_checkpoint_errors(target):
        yield


@contextmanager
def _stage(target: Path, ranks: Ranks) -> Iterator[Path]:
    """Lock the staging folder on rank 0 against other processes, and remove it if the save fails."""
    lock, staging = folders.lock_of(target), folders.staging_of(target)
    with _together(target, ranks):
        if ranks.rank == 0:
            lock.take()
    try:
        yield staging
    except BaseException:
        if ranks.rank == 0:  # no rank still writes: an error on one rank is raised by all
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        lock.release()


def _check(
    target: Path,
    tables: Tables,
    base: str | os.PathLike[str] | None,
    dense: Callable[[Path], None] | None,
) -> Manifest | None:
    if target.exists():
        raise ConfigError(f"{target} exists already: a checkpoint isn't overwritten; choose another name")
    if not tables and dense is None:
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
    """Finish the save on rank 0: collect the ranks' parts, write the manifest, rename the folder."""
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
