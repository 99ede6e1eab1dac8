"""Sharded checkpoints of models with tables. Any number of ranks can load what any other number saved.

- `sharded` saves and loads; `callback`, `backup` and `resumed_fit` do so around `fit`.
- `store`, `chain`, `manifest`, `contents` and `lock`: a folder of checkpoints on disk, and its contents.
- `table_part`, `table_load` and `record_file`: a rank's part of a table.
- `dense_weights`: all other weights.
- `table_export`, `table_import`, `table_description` and `column_files`: tables as columns.

Each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.core.imports import load_lazily

if TYPE_CHECKING:
    from gmeta.checkpoint.callback import ShardedCheckpoint
    from gmeta.checkpoint.table_export import export_table
    from gmeta.checkpoint.table_import import import_table

_WHERE = {
    "ShardedCheckpoint": "gmeta.checkpoint.callback",
    "export_table": "gmeta.checkpoint.table_export",
    "import_table": "gmeta.checkpoint.table_import",
}
"""Name -> the module that defines it."""

_MOVED = {
    "CheckpointInfo": "gmeta.checkpoint.sharded",
    "CheckpointReader": "gmeta.checkpoint.chain",
    "CheckpointStore": "gmeta.checkpoint.store",
    "CheckpointSummary": "gmeta.checkpoint.contents",
    "TableExport": "gmeta.checkpoint.contents",
    "TableImport": "gmeta.checkpoint.table_import",
    "export_saved_table": "gmeta.checkpoint.contents",
    "load": "gmeta.checkpoint.sharded",
    "save": "gmeta.checkpoint.sharded",
    "summarize": "gmeta.checkpoint.contents",
}
"""Old name -> the module that has it now, for one release."""

__all__ = ["ShardedCheckpoint", "export_table", "import_table"]

__getattr__, __dir__ = load_lazily(__name__, _WHERE, _MOVED)
