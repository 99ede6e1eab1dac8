"""Exports a table of a checkpoint on disk. It needs neither the model nor TensorFlow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gmeta.checkpoint.chain import CheckpointReader, Columns
from gmeta.checkpoint.column_files import check_target, size_of, write_table
from gmeta.checkpoint.contents import find_checkpoint
from gmeta.checkpoint.table_description import Format, TableDescription
from gmeta.core.files import resumable_folder
from gmeta.core.merged_tables import NamedTable, find_table
from gmeta.core.shares import LOGICAL_SHARDS


@dataclass(frozen=True)
class TableExport:
    """Report on an exported table.

    Attributes:
      folder: The folder that was made.
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
    """Export a table of a checkpoint. The files are those that `export_table` writes, to the same bytes.

    Args:
      checkpoint: The checkpoint, or a folder of checkpoints, whose latest one is read. It may be an
        increment; those that it continues must lie beside it.
      table: As in `export_table`. A checkpoint from before gmeta noted which tables are merged has only
        physical tables, by the names that ``gmeta inspect`` shows; their keys are written as they are.
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
            written = write_table(staging, format, description, _shards(reader, found), finite=finite)
    return TableExport(out, written, size_of(out), time.perf_counter() - started)


def _shards(reader: CheckpointReader, found: NamedTable) -> Iterator[Columns]:
    for shard in range(LOGICAL_SHARDS):
        read = reader.read_shard(found.physical, shard)
        yield found.own({"keys": read.pop("key"), "values": read.pop("weights"), **read})
