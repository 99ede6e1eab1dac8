"""Reads the contents of a checkpoint on disk, without the model and without TensorFlow.

`summarize` returns summaries, which ``gmeta inspect`` prints; `export_saved_table` exports a table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.checkpoint.chain import CheckpointReader, Columns
from gmeta.checkpoint.column_files import check_target, size_of, write_table
from gmeta.checkpoint.manifest import FILE_NAME, FULL, FilterLayout, TableEntry
from gmeta.checkpoint.table_description import Format, TableDescription
from gmeta.core.errors import DataError
from gmeta.core.files import resumable_folder
from gmeta.core.merged_tables import NamedTable, find_table
from gmeta.core.shares import LOGICAL_SHARDS


@dataclass(frozen=True)
class LargeRow:
    """Row whose weights have one of the largest L2 norms."""

    norm: float
    key: int
    frequency: int
    last_step: int


@dataclass(frozen=True)
class TableSummary:
    """Summary of one table.

    Attributes:
      rows: Number of rows.
      dim: Width of a row.
      optimizer: Kind of the optimizer.
      slots: The names of the optimizer's slots.
      step: The table's step.
      bytes: Size of the table's files, including those of the checkpoints that this one continues.
      kind: ``"full"`` or ``"increment"``: the form of the chain's last checkpoint.
      changed: Number of rows in the last checkpoint.
      removed: Number of removed keys in the last checkpoint.
      reasons: Why parts were saved in full although a base was given.
      waiting: How many keys wait for admission with exact counts.
      filter: The layout of admission's filter; None if it has none.
      settings: Settings of optimizer, initializer, seed, admission and precision.
      filter_used: The share of the filter's counters above zero; None if they weren't read.
      mean_norm: Mean L2 norm of the weights; None if the rows weren't read.
      largest: The rows with the largest norms, in descending order.
    """

    rows: int
    dim: int
    optimizer: str
    slots: tuple[str, ...]
    step: int
    bytes: int
    kind: str
    changed: int
    removed: int
    reasons: tuple[str, ...]
    waiting: int
    filter: FilterLayout | None
    settings: dict[str, Any]
    filter_used: float | None = None
    mean_norm: float | None = None
    largest: tuple[LargeRow, ...] = ()


@dataclass(frozen=True)
class CheckpointSummary:
    """Summary of one checkpoint.

    Attributes:
      folder: The checkpoint's folder.
      id: The checkpoint's id.
      world_size: How many ranks saved it.
      chain: The folders of the checkpoints in its chain, from the oldest to this one.
      bytes: Size of its own files.
      chain_bytes: Size of all files of the chain.
      metadata: The caller's metadata.
      files: Name of a file that doesn't belong to a table -> its size in bytes.
      tables: Name -> summary of the table.
    """

    folder: Path
    id: str
    world_size: int
    chain: tuple[str, ...]
    bytes: int
    chain_bytes: int
    metadata: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    tables: dict[str, TableSummary] = field(default_factory=dict)


def find_checkpoint(folder: Path) -> Path:
    """Return the folder itself if it is a checkpoint, else the checkpoint in it whose name comes last.

    Raises:
      DataError: The folder is not a checkpoint and contains none.
    """
    if (folder / FILE_NAME).exists():
        return folder
    inside = sorted(
        path.parent for path in folder.glob("*/" + FILE_NAME) if not path.parent.name.startswith(".")
    )
    if not inside:
        raise DataError(
            "no checkpoint here", path=folder, advice="name a checkpoint or a folder of checkpoints"
        )
    return inside[-1]


def summarize(folder: Path, top: int = 5, *, verify: bool = False) -> CheckpointSummary:
    """Summarize a checkpoint from its manifest, and from its rows if norms are requested.

    Args:
      folder: The checkpoint.
      top: How many of the largest norms to find in each table; 0: read no rows and no filters.
      verify: Whether to read everything and compare the checksums.

    Raises:
      DataError: The checkpoint isn't whole.
    """
    with CheckpointReader(folder) as reader:
        if verify:
            reader.verify()
        tables = {}
        for name, entry in reader.manifest.tables.items():
            table = _table(reader, name, entry)
            if top:
                mean, largest = _norms(reader, name, top)
                used = _filter_used(reader, name, entry.filter)
                table = replace(table, mean_norm=mean, largest=largest, filter_used=used)
            tables[name] = table
        manifest = reader.manifest
        return CheckpointSummary(
            folder=folder,
            id=manifest.id,
            world_size=manifest.world_size,
            chain=tuple(link.folder.name for link in reader.links),
            bytes=manifest.bytes,
            chain_bytes=sum(link.manifest.bytes for link in reader.links),
            metadata=dict(manifest.metadata),
            files={name: file.bytes for name, file in manifest.files.items()},
            tables=tables,
        )


def _table(reader: CheckpointReader, name: str, entry: TableEntry) -> TableSummary:
    links = [link.manifest.tables[name] for link in reader.links if name in link.manifest.tables]
    kinds = {part.kind for part in entry.parts}
    return TableSummary(
        rows=entry.size,
        dim=entry.dim,
        optimizer=entry.optimizer,
        slots=entry.slots,
        step=entry.step,
        bytes=sum(link.bytes for link in links),
        kind=FULL if kinds == {FULL} else "+".join(sorted(kinds)),
        changed=sum(segment.rows for part in entry.parts for segment in part.rows.segments),
        removed=sum(
            segment.rows
            for part in entry.parts
            if part.removed is not None
            for segment in part.removed.segments
        ),
        reasons=tuple(dict.fromkeys(part.reason for part in entry.parts if part.reason)),
        waiting=entry.waiting,
        filter=entry.filter,
        settings=dict(entry.settings),
    )


def _filter_used(reader: CheckpointReader, table: str, layout: FilterLayout | None) -> float | None:
    if layout is None:
        return None
    filters = (reader.read_filter(table, number) for number in range(layout.shards))
    used = sum(int(np.count_nonzero(counters)) for counters in filters if counters is not None)
    return used / (layout.shards * layout.counters)


def _norms(reader: CheckpointReader, table: str, top: int) -> tuple[float | None, tuple[LargeRow, ...]]:
    total, count = 0.0, 0
    best: list[LargeRow] = []
    for columns in _shards(reader, table):
        norms = np.linalg.norm(columns["weights"].astype(np.float64), axis=1)
        total, count = total + float(norms.sum()), count + len(norms)
        few = min(top, len(norms))
        for place in np.argpartition(norms, len(norms) - few)[len(norms) - few :]:
            numbers = (columns[name][place] for name in ("key", "frequency", "last_step"))
            best.append(LargeRow(float(norms[place]), *map(int, numbers)))
        # NaN norms sort before all others.
        best = sorted(best, key=lambda row: (-np.nan_to_num(row.norm, nan=np.inf), row.key))[:top]
    return total / count if count else None, tuple(best)


def _shards(reader: CheckpointReader, table: str) -> Iterator[Columns]:
    for shard in range(LOGICAL_SHARDS):
        columns = reader.read_shard(table, shard)
        if len(columns["key"]):
            yield columns


def format_size(size: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


@dataclass(frozen=True)
class TableExport:
    """Report on an exported table.

    Attributes:
      folder: The new folder.
      description: The content of ``_table.json``.
      bytes: Size of the files.
      seconds: How long it took.
    """

    folder: Path
    description: TableDescription
    bytes: int
    seconds: float


def export_saved_table(
    checkpoint: str | os.PathLike[str],
    table: str | None,
    out: str | os.PathLike[str],
    *,
    format: Format = "arrow",
    state: bool = False,
    overwrite: bool = False,
    finite: bool = True,
) -> TableExport:
    """Export a table of a checkpoint to the same files, byte for byte, as `export_table`.

    Args:
      checkpoint: The checkpoint, or a folder of checkpoints, whose latest one is read. It may be an
        increment; those that it continues must lie beside it.
      table: As in `export_table`. An old checkpoint, which doesn't record which tables are merged, has only
        physical tables, under the names that ``gmeta inspect`` shows; their keys are written unchanged.
      out: As in `export_table`.
      format: As in `export_table`.
      state: As in `export_table`.
      overwrite: As in `export_table`.
      finite: As in `export_table`.

    Returns:
      What was written.

    Raises:
      ConfigError: There is no such table or format.
      DataError: The checkpoint is missing or damaged.
      NotFiniteError: A row holds NaN or infinity; the message names its id.
      GmetaError: ``out`` exists, or can't be written.

    Example:
      ::

        export_saved_table("runs/a/checkpoints", "item", "item", format="npy")
    """
    started, out = time.perf_counter(), Path(out)
    folder = find_checkpoint(Path(checkpoint))
    with CheckpointReader(folder) as reader:
        entries = reader.manifest.tables
        merged = {name: entry.merged_keys for name, entry in entries.items()}
        found = find_table(table, merged, f"checkpoint {folder}")
        entry = entries[found.physical]
        layout = {name: getattr(entry, name) for name in ("dim", "optimizer", "slots", "slot_floats")}
        description = TableDescription.of(found, layout, step=entry.step, state=state)
        check_target(out, format, overwrite=overwrite)
        with resumable_folder(out, resume=False) as staging:
            written = write_table(staging, format, description, _table_shards(reader, found), finite=finite)
    return TableExport(out, written, size_of(out), time.perf_counter() - started)


def _table_shards(reader: CheckpointReader, found: NamedTable) -> Iterator[Columns]:
    for shard in range(LOGICAL_SHARDS):
        read = reader.read_shard(found.physical, shard)
        yield found.own({"keys": read.pop("key"), "values": read.pop("weights"), **read})
