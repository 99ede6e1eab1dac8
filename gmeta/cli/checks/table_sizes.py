"""The sizes of a checkpoint's tables, for ``gmeta doctor``.

It loads no TensorFlow. Rows of `gmeta.policies.TwoPrecisions` are counted by their frequencies, so the
records of such a table are read; of other tables the manifest says all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gmeta.checkpoint.files.chain import CheckpointReader
from gmeta.checkpoint.files.contents import format_size
from gmeta.checkpoint.files.manifest import TableEntry
from gmeta.cli.checks.installation import Finding
from gmeta.core.logical_shards import LOGICAL_SHARDS

INDEX_BYTES = 28
"""Bytes of host memory, at most, for a row in the key index of a large table."""

TABLES_SHARE = 0.75
"""Share of the available memory that tables may take. The rest of the process has the others."""


@dataclass(frozen=True)
class TableSize:
    """Size of one table.

    Attributes:
      name: Its name in the checkpoint.
      rows: Number of rows.
      floats: Weights and slots of a row.
      half_rows: How many rows are in half precision.
      two_precisions: Whether rows may be (`gmeta.policies.TwoPrecisions`).
    """

    name: str
    rows: int
    floats: int
    half_rows: int = 0
    two_precisions: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a float32 row."""
        return 8 + 4 * self.floats

    @property
    def half_bytes(self) -> int:
        """Bytes of a row in half precision."""
        return 8 + 4 * -(-self.floats // 2)

    @property
    def records(self) -> int:
        """Bytes of all rows, without the index."""
        return self.rows * self.row_bytes - self.half_rows * (self.row_bytes - self.half_bytes)


def read_sizes(folder: Path) -> list[TableSize]:
    """Read the sizes of a checkpoint's tables.

    Raises:
      DataError: The checkpoint isn't whole.
    """
    with CheckpointReader(folder) as reader:
        return [
            TableSize(
                name,
                entry.size,
                entry.dim + entry.slot_floats,
                _half_rows(reader, name, entry),
                "half_below" in entry.settings,
            )
            for name, entry in reader.manifest.tables.items()
        ]


def _half_rows(reader: CheckpointReader, name: str, entry: TableEntry) -> int:
    half_below = entry.settings.get("half_below")
    if half_below is None:
        return 0
    frequencies = (reader.read_shard(name, shard)["frequency"] for shard in range(LOGICAL_SHARDS))
    return sum(int(np.count_nonzero(found < half_below)) for found in frequencies)


def describe(table: TableSize) -> Finding:
    """Say what a table in host memory takes."""
    half = f", {table.half_rows:,} of {table.half_bytes} in half precision" if table.half_rows else ""
    index = format_size(table.rows * INDEX_BYTES)
    return Finding(
        f"table {table.name}",
        f"{table.rows:,} rows of {table.row_bytes} bytes{half}: {format_size(table.records)}, "
        f"and {index} for their index",
    )
