"""The sizes of a checkpoint's tables, for ``gmeta doctor``.

It loads no TensorFlow. Rows of `gmeta.policies.TwoPrecisions` are counted by their frequencies and last
steps, so the records of such a table are read; of other tables the manifest says all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    if "half_below" not in entry.settings:
        return 0
    step = entry.parts[0].step
    shards = (reader.read_shard(name, shard) for shard in range(LOGICAL_SHARDS))
    return sum(
        int(are_half(found["frequency"], found["last_step"], step, entry.settings).sum()) for found in shards
    )


def are_half(
    frequency: NDArray[Any], last_step: NDArray[Any], step: int, settings: Mapping[str, Any]
) -> NDArray[np.bool_]:
    """Say which rows of `gmeta.policies.TwoPrecisions` have 16 bits, or get them in the next sweep.

    Args:
      frequency: Uses of the rows, (n,).
      last_step: Their last steps, (n,).
      step: The table's step.
      settings: ``half_below``, and ``half_life`` if rows cool down.
    """
    threshold, half_life = settings["half_below"], settings.get("half_life")
    rare = frequency < threshold
    if half_life is None:
        return rare
    # The rule of ops/table/core/half_rule.h, in the same whole numbers.
    idle = np.maximum(step - last_step.astype(np.int64), 0).astype(np.uint64)
    halvings, rest = np.divmod(idle, np.uint64(half_life))
    scaled = frequency.astype(np.uint64) * (np.uint64(2 * half_life) - rest)
    cold = scaled >> np.minimum(halvings, np.uint64(63)) < threshold * half_life
    return rare | ((idle > 0) & cold)


def describe(table: TableSize) -> Finding:
    """Say what a table in host memory takes."""
    half = f", {table.half_rows:,} of {table.half_bytes} in half precision" if table.half_rows else ""
    index = format_size(table.rows * INDEX_BYTES)
    return Finding(
        f"table {table.name}",
        f"{table.rows:,} rows of {table.row_bytes} bytes{half}: {format_size(table.records)}, "
        f"and {index} for their index",
    )
