"""Sharded checkpoints of models with tables. Any number of ranks can load what any other number saved.

Each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.core.lazy import load_lazily

if TYPE_CHECKING:
    from gmeta.checkpoint.callback import ShardedCheckpoint
    from gmeta.checkpoint.files.chain import CheckpointReader
    from gmeta.checkpoint.files.contents import CheckpointSummary, summarize
    from gmeta.checkpoint.sharded import CheckpointInfo, load, save
    from gmeta.checkpoint.store import CheckpointStore

_WHERE = {
    "CheckpointInfo": "gmeta.checkpoint.sharded",
    "CheckpointReader": "gmeta.checkpoint.files.chain",
    "CheckpointStore": "gmeta.checkpoint.store",
    "CheckpointSummary": "gmeta.checkpoint.files.contents",
    "ShardedCheckpoint": "gmeta.checkpoint.callback",
    "load": "gmeta.checkpoint.sharded",
    "save": "gmeta.checkpoint.sharded",
    "summarize": "gmeta.checkpoint.files.contents",
}
"""Name -> the module that defines it."""

__all__ = [
    "CheckpointInfo",
    "CheckpointReader",
    "CheckpointStore",
    "CheckpointSummary",
    "ShardedCheckpoint",
    "load",
    "save",
    "summarize",
]

__getattr__, __dir__ = load_lazily(__name__, _WHERE)
