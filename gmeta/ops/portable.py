"""Whether ops take their form in plain TensorFlow (`gmeta.ops.portable_ops`)."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import tensorflow as tf

from gmeta.core.errors import ConfigError


class FreezesTables(Protocol):
    """What gives a table's copy to read in its place: `gmeta.ops.table.portable_tables.PortableTables`."""

    def freeze(self, table: Any) -> Any:
        """Copy a table as it stands."""
        ...


ACTIVE: ContextVar[FreezesTables | None] = ContextVar("portable_tables", default=None)
"""What `portable_ops` has set in this thread."""


def is_portable() -> bool:
    """Whether plain TensorFlow ops are asked for."""
    return ACTIVE.get() is not None


def freeze(table: Any, insert: bool | tf.Tensor) -> Any:
    """The copy to read instead of the table; None outside of `portable_ops`.

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
