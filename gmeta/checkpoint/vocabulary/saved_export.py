"""Exports a table of a checkpoint on disk. It needs neither the model nor TensorFlow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gmeta.checkpoint.files.chain import CheckpointReader, Columns
from gmeta.checkpoint.files.contents import find_checkpoint
from gmeta.checkpoint.files.manifest import FILE_NAME, TableEntry
from gmeta.checkpoint.vocabulary.column_files import check_target, size_of, write_table
from gmeta.checkpoint.vocabulary.description import Format, TableDescription
from gmeta.core.data.merged_keys import MergedKeys
from gmeta.core.data.named_tables import NamedTable, find_table
from gmeta.core.errors import DataError
from gmeta.core.logical_shards import LOGICAL_SHARDS
from gmeta.core.staging import resumable_folder


@dataclass(frozen=True)
class TableExport:
    """Report on an exported table.

    Attributes:
      folder: The folder that was made.
      description: What ``table.json`` says.
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

    Returns:
      What was written.

    Raises:
      ConfigError: There is no such table or format.
      DataError: The checkpoint is missing or damaged.
      GmetaError: ``out`` exists, or can't be written.

    Example:
      ::

        export_saved_table("runs/a/checkpoints", "item", "item", format="npy")
    """
    started, out = time.perf_counter(), Path(out)
    folder = find_checkpoint(Path(checkpoint))
    with CheckpointReader(folder) as reader:
        entries = reader.manifest.tables
        merged = {name: _merged_keys_of(entry, folder) for name, entry in entries.items()}
        found = find_table(table, merged, f"checkpoint {folder}")
        entry = entries[found.physical]
        layout = {name: getattr(entry, name) for name in ("dim", "optimizer", "slots", "slot_floats")}
        description = TableDescription.of(found, layout, step=entry.step, state=state)
        check_target(out, format, overwrite=overwrite)
        with resumable_folder(out, resume=False) as staging:
            written = write_table(staging, format, description, _shards(reader, found))
    return TableExport(out, written, size_of(out), time.perf_counter() - started)


def _merged_keys_of(entry: TableEntry, folder: Path) -> MergedKeys | None:
    try:
        return MergedKeys.from_json(entry.settings) if "tables" in entry.settings else None
    except ValueError as error:
        raise DataError(f"not what gmeta writes: {error}", path=folder / FILE_NAME) from error


def _shards(reader: CheckpointReader, found: NamedTable) -> Iterator[Columns]:
    for shard in range(LOGICAL_SHARDS):
        read = reader.read_shard(found.physical, shard)
        yield found.own({"keys": read.pop("key"), "values": read.pop("weights"), **read})
