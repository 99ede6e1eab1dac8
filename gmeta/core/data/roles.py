"""Roles of a prepared data set's columns: which is the label, which is the time, and which are hashed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gmeta.core.data.schema import Schema

_USUAL_LABELS = ("label", "rating")
_USUAL_TIME = "timestamp"


@dataclass(frozen=True)
class Roles:
    """Roles of a prepared data set's columns, as given to `gmeta prepare`.

    Attributes:
      task: The column of tasks.
      batch: The column that numbers the batches of a task.
      time: The column that a task's rows are sorted by; None if there is none.
      label: The column to predict; if none was named, ``label`` or ``rating``; None if there is neither.
      hashed: The columns of hashed text.

    Example:
      >>> Manifest.load(Path("data/clicks")).roles  # doctest: +SKIP
      Roles(task='user', batch='batch_id', time='ts', label='click', hashed=('user', 'item'))
    """

    task: str
    batch: str
    time: str | None = None
    label: str | None = None
    hashed: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: Schema, config: Mapping[str, Any]) -> Roles:
        """Read the roles from a manifest's schema and settings.

        If the settings don't describe a table, ``timestamp`` is the time.

        Args:
          schema: The columns.
          config: The settings that `gmeta prepare` stored, `gmeta.core.data.manifest.Manifest.config`.
        """
        table = config.get("table")
        usual = next((name for name in _USUAL_LABELS if name in schema), None)
        if not isinstance(table, Mapping):
            return cls(schema.task, schema.batch, _USUAL_TIME if _USUAL_TIME in schema else None, usual)

        def column(role: str) -> str | None:
            name = table.get(role)
            return name if isinstance(name, str) and name in schema else None

        columns = table.get("columns")
        hashed = tuple(
            name
            for name, spec in (columns.items() if isinstance(columns, Mapping) else ())
            if name in schema and isinstance(spec, Mapping) and spec.get("hash") is True
        )
        return cls(schema.task, schema.batch, column("time"), column("label") or usual, hashed)
