"""Sharded checkpoints of models with tables. Any number of ranks can load what any other number saved.

Single tables are exported as plain columns, out of a model or a checkpoint, and imported from them.

Each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.core.lazy import load_lazily

if TYPE_CHECKING:
    from gmeta.checkpoint.callback import ShardedCheckpoint
    from gmeta.checkpoint.saved_export import export_saved_table
    from gmeta.checkpoint.table_export import export_table
    from gmeta.checkpoint.table_import import import_table

_WHERE = {
    "ShardedCheckpoint": "gmeta.checkpoint.callback",
    "export_saved_table": "gmeta.checkpoint.saved_export",
    "export_table": "gmeta.checkpoint.table_export",
    "import_table": "gmeta.checkpoint.table_import",
}
"""Name -> the module that defines it."""

_MOVED = {
    "CheckpointInfo": "gmeta.checkpoint.sharded",
    "CheckpointReader": "gmeta.checkpoint.chain",
    "CheckpointStore": "gmeta.checkpoint.store",
    "CheckpointSummary": "gmeta.checkpoint.contents",
    "TableExport": "gmeta.checkpoint.saved_export",
    "TableImport": "gmeta.checkpoint.table_import",
    "load": "gmeta.checkpoint.sharded",
    "save": "gmeta.checkpoint.sharded",
    "summarize": "gmeta.checkpoint.contents",
}
"""Old name -> the module that has it now, for one release."""

__all__ = ["ShardedCheckpoint", "export_saved_table", "export_table", "import_table"]

__getattr__, __dir__ = load_lazily(__name__, _WHERE, _MOVED)
