"""The switch between native ops and their forms in plain TensorFlow (`gmeta.ops.portable_ops`)."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import tensorflow as tf

from gmeta.core.errors import ConfigError


class FreezesTables(Protocol):
    """Source of copies to read instead of tables: `gmeta.ops.table.portable_tables.PortableTables`."""

    def freeze(self, table: Any) -> Any:
        """Copy a table in its current state."""
        ...


ACTIVE: ContextVar[FreezesTables | None] = ContextVar("portable_tables", default=None)
"""The tables that `portable_ops` has set in this thread; None outside of it."""


def is_portable() -> bool:
    """Return whether ops must use their forms in plain TensorFlow."""
    return ACTIVE.get() is not None


def freeze(table: Any, insert: bool | tf.Tensor) -> Any:
    """Return the copy to read instead of the table; None outside of `portable_ops`.

    Raises:
      ConfigError: The lookup would insert.
    """
    tables = ACTIVE.get()
    if tables is None:
        return None
    if insert is True:
        raise ConfigError(
            f"table {table.name!r}: an exported graph stores no rows; look up with insert=False, as "
            "layers do that are called with training=False"
        )
    return tables.freeze(table)
