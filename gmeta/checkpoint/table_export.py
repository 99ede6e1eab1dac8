"""Exports a table of a model, from all ranks that hold its rows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.checkpoint.chain import Columns
from gmeta.checkpoint.column_files import check_target, open_source, size_of, write_table
from gmeta.checkpoint.contents import TableExport, export_saved_table
from gmeta.checkpoint.table_description import Format, TableDescription
from gmeta.checkpoint.table_part import export_ranges, layout, refuse_foreign
from gmeta.core.collectives.rank_group import Gather, Ranks
from gmeta.core.errors import ConfigError
from gmeta.core.files import explain_write_errors, resumable_folder
from gmeta.core.merged_tables import NamedTable, find_table
from gmeta.core.shares import owned_shards
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.restored_rows import tables_by_name

_PARTS = "parts"  # where each rank's rows are until rank 0 joins them


def export_table(
    model: Any,
    table: str | None,
    out: str | os.PathLike[str],
    *,
    format: Format = "arrow",
    state: bool = False,
    overwrite: bool = False,
    finite: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    gather: Gather | None = None,
) -> TableExport:
    """Export a table's ids with their rows and frequencies, as columns that NumPy or any Arrow reader opens.

    ========================  =============================  ================================================
    column                    shape and dtype                contents
    ========================  =============================  ================================================
    ``keys``                  (n,) int64                     ids, as the features give them (hashed: hashes)
    ``values``                (n, dim) float32               rows
    ``frequency``             (n,) uint32                    how many lookups of training have read the row
    ``slots``, with state     (n, slot_floats) float32       the optimizer's slots, one after another
    ``last_step``, with state (n,) uint32                    the table's step when the row was last used
    ========================  =============================  ================================================

    The folder has a file ``<column>.npy`` for each, or ``table.arrow`` with all of them, and ``_table.json``
    with the width, the optimizer, the names of its slots, and the table's step. Rows are ordered by logical
    shard, then by id, so the bytes are the same for any number of ranks. Memory stays near a thirty-second of
    the table, as in a save. With several ranks, each writes its rows, and rank 0 joins them into one file.
    Ids that wait for admission have no row and are left out. Export between two steps.

    Args:
      model: A model, layer or `gmeta.ops.HashTable`; or the path of a checkpoint, or of a folder of
        checkpoints, whose latest one is read. Without a model, one process reads it alone.
      table: The name of the table: that of its `gmeta.layers.TableConfig`, or of the only feature that uses
        it, however tables are merged; ``"<collection>/<name>"`` if two collections have a table of that name;
        or the name of a `gmeta.ops.HashTable`. None: the only one.
      out: The folder to make, which appears whole or not at all.
      format: ``"arrow"`` or ``"npy"``.
      state: Whether to export slots and last steps too, so that training can continue with them.
      overwrite: Whether to replace an exported table.
      finite: Whether to refuse rows that hold NaN or infinity.
      rank: As in `gmeta.checkpoint.sharded.save`.
      world_size: As in `gmeta.checkpoint.sharded.save`.
      gather: As in `gmeta.checkpoint.sharded.save`.

    Returns:
      What was written, by all ranks together.

    Raises:
      ConfigError: There is no such table or format; or the table holds keys of shards that this rank doesn't
        own; or ranks are named for a checkpoint on disk.
      DataError: The checkpoint is missing or damaged.
      NotFiniteError: A row holds NaN or infinity; the message names its id.
      GmetaError: ``out`` exists, or can't be written. An error on one rank is raised by all ranks.

    Example:
      ::

        export_table(model, "item", "item", format="npy")
        keys, values = np.load("item/keys.npy"), np.load("item/values.npy")
    """
    if isinstance(model, str | os.PathLike):
        if (rank, world_size, gather) != (None, None, None):
            raise ConfigError("rank, world_size and gather are for tables of a model: leave them out")
        return export_saved_table(
            model, table, out, format=format, state=state, overwrite=overwrite, finite=finite
        )
    started, out = time.perf_counter(), Path(out)
    tables = tables_by_name(model)
    merged = {name: each.merged_keys for name, each in tables.items()}
    found = find_table(table, merged, f"{type(model).__name__} {getattr(model, 'name', '')!r}")
    source = tables[found.physical]
    ranks = Ranks.of(rank, world_size, gather)
    if ranks.gather is None and ranks.size > 1:
        raise ConfigError(
            f"{ranks.size} ranks export together: pass gather=, which gives every rank's object to all"
        )
    description = TableDescription.of(found, layout(source), step=int(source.step()), state=state)
    with ExitStack() as stack:

        def begin() -> str:
            check_target(out, format, overwrite=overwrite)
            return str(stack.enter_context(resumable_folder(out, resume=False)))

        def finish() -> tuple[int, int]:
            whole = _join(staging, format, description) if ranks.owners > 1 else written
            size = size_of(staging)
            stack.close()
            return whole.rows, size

        staging = Path(ranks.from_first(begin))
        with ranks.together(), explain_write_errors(out):
            if ranks.writes:
                folder = staging / _PARTS / f"{ranks.owner:05d}" if ranks.owners > 1 else staging
                folder.mkdir(parents=True, exist_ok=True)
                shards = owned_shards(ranks.owner, ranks.owners)
                batches = _shards(source, found, shards)
                written = write_table(folder, format, description, batches, finite=finite)
                refuse_foreign(found.physical, source, ranks.owner, shards)
        rows, size = ranks.from_first(finish)
    return TableExport(out, replace(description, rows=rows), size, time.perf_counter() - started)


def _shards(table: HashTable, found: NamedTable, shards: range) -> Iterator[Columns]:
    for _, exported in export_ranges(table, shards):
        columns = {"keys": exported["keys"], "values": exported["rows"]}
        columns |= {name: exported[name] for name in ("slots", "frequency", "last_step")}
        ends = exported["row_splits"]
        for place in np.flatnonzero(np.diff(ends)).tolist():
            yield found.own({name: v[ends[place] : ends[place + 1]] for name, v in columns.items()})


def _join(staging: Path, form: Format, description: TableDescription) -> TableDescription:
    """Join the ranks' files into one, batch by batch, so that the bytes equal those of one rank."""
    parts = sorted((staging / _PARTS).iterdir())
    batches = (piece.columns for part in parts for piece in open_source(part).pieces(description.columns))
    written = write_table(staging, form, description, batches, finite=False)  # each rank has checked
    shutil.rmtree(staging / _PARTS)
    return written
