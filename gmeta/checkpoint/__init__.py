"""Sharded checkpoints of models with tables: any number of ranks reads what any other wrote.

Each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
"""Name -> the module that has it."""

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


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
