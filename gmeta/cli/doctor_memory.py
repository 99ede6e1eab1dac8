"""Compares the tables of a checkpoint with the memory and the drive of this machine, for ``gmeta doctor``.

It also compares tables on a GPU with the memory of that GPU. It loads no TensorFlow.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.checkpoint.chain import CheckpointReader
from gmeta.checkpoint.contents import find_checkpoint, format_size
from gmeta.checkpoint.manifest import TableEntry
from gmeta.core.errors import ConfigError
from gmeta.core.shares import LOGICAL_SHARDS
from gmeta.core.terminal import Finding, Status
from gmeta.policies import Tiers

# Finds the drive that would hold the rows of tables, and how many bytes they would take there.

ROW_BYTES = 12  # of a row on the drive, besides its record
FACTOR = 2  # the files have at most as many dead slots as rows


@dataclass(frozen=True)
class Drive:
    """The drive that would hold rows: a folder on it, and its free bytes."""

    folder: Path
    free: int


def find_drive(folder: Path) -> Drive:
    """Return the drive of an existing folder.

    Raises:
      ConfigError: It isn't a folder, or can't be written to.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        what = "isn't a folder" if folder.exists() else "doesn't exist"
        raise ConfigError(f"--ssd {folder} {what}: name a folder on the drive that would hold rows")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--ssd {folder} can't be written to: name a folder that can")
    return Drive(folder, shutil.disk_usage(folder).free)


def file_bytes(records: float, rows: float) -> int:
    """Return the most bytes that files take for ``rows`` rows whose records have ``records`` bytes in all."""
    return math.ceil(FACTOR * (records + ROW_BYTES * rows))


# The sizes of a checkpoint's tables, for ``gmeta doctor``.
#
# It loads no TensorFlow. For a table with `gmeta.policies.TwoPrecisions` it reads the records, because the
# frequencies and last steps decide which rows count as half; for other tables the manifest suffices.

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
      floats: Number of weights and slots in a row.
      half_rows: How many rows are in half precision.
      two_precisions: Whether rows may be in half precision (`gmeta.policies.TwoPrecisions`).
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
      DataError: The checkpoint isn't complete.
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
    """Return which rows of `gmeta.policies.TwoPrecisions` are in 16 bits, now or after the next sweep.

    Args:
      frequency: How often each row was used, (n,).
      last_step: Each row's last step, (n,).
      step: The table's step.
      settings: ``half_below``, and ``half_life`` if rows cool down.
    """
    threshold, half_life = settings["half_below"], settings.get("half_life")
    rare = frequency < threshold
    if half_life is None:
        return rare
    # The rule of ops/table/core/half_rule.h, in the same integers.
    idle = np.maximum(step - last_step.astype(np.int64), 0).astype(np.uint64)
    halvings, rest = np.divmod(idle, np.uint64(half_life))
    scaled = frequency.astype(np.uint64) * (np.uint64(2 * half_life) - rest)
    cold = scaled >> np.minimum(halvings, np.uint64(63)) < threshold * half_life
    return rare | ((idle > 0) & cold)


def describe(table: TableSize) -> Finding:
    """Describe the memory that a table in host memory takes."""
    half = f", {table.half_rows:,} of {table.half_bytes} in half precision" if table.half_rows else ""
    index = format_size(table.rows * INDEX_BYTES)
    return Finding(
        f"table {table.name}",
        f"{table.rows:,} rows of {table.row_bytes} bytes{half}: {format_size(table.records)}, "
        f"and {index} for their index",
    )


# Compares the tables of a checkpoint with the memory of a GPU and of its host, for ``gmeta doctor``.
#
# The GPU's memory holds the index of all keys and ``hbm_rows`` rows of each table. The other rows are in host
# memory (`gmeta.policies.Tiers`).

SLOT_BYTES = 16  # of the index
LIST_BYTES = 8  # a row's mark of use, and its entry in the list of free numbers; both lists grow by copying
HEADER_BYTES = 8  # a row's frequency and last step, which stay on the GPU
FEWEST_SLOTS = 1024
PART_SLOTS = 1 << 20  # the index grows part by part, and a part has at most this many slots
BLOCK_BYTES = 4 << 20  # rows are allocated in blocks of at most this size, unless 32 rows take more


def gpu_memory() -> int | None:
    """Return the free bytes of the GPU with the least free memory, from nvidia-smi; None without a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
        return min((int(line) << 20 for line in said.splitlines()), default=None)
    except (OSError, subprocess.SubprocessError, ValueError):  # no driver, or no such number
        return None


def judge_gpu(tables: Sequence[TableSize], gpu: int, memory: int, drive: Drive | None = None) -> Finding:
    """Report whether tables fit on a GPU, alone or with rows in other tiers, and how many rows fit there.

    The tables are assumed to be one collection's, with the same ``hbm_rows`` each.

    Args:
      tables: The tables.
      gpu: Available bytes of the GPU's memory; tables may take `TABLES_SHARE` of them.
      memory: Available bytes of host memory; tables may take the same share of them.
      drive: The drive that would hold rows, or None.
    """
    usable, index = int(gpu * TABLES_SHARE), sum(index_bytes(table.rows) for table in tables)
    growth = sum(growth_bytes(table.rows) for table in tables)
    rows = sum(table.rows for table in tables)
    records = sum(_bytes(table, table.rows - table.half_rows, table.half_rows) for table in tables)
    need = f"this model needs {rows:,} rows, {format_size(records + index)} with their index"
    left = usable - index - growth - len(tables) * BLOCK_BYTES
    if records <= left:
        return Finding("tables on a GPU", f"{need}; all of them fit in the GPU's memory")
    if _bytes_on_gpu(tables, 1) > left:
        return Finding(
            "tables on a GPU",
            f"{need}; they don't fit: the index of all rows takes {format_size(index)} of the GPU's memory, "
            f"{format_size(growth)} more while it grows, and {format_size(usable)} are available",
            Status.BROKEN,
            "train on ranks of more GPUs, keep the tables in host memory, or bound the rows "
            "(gmeta.policies.LRU)",
        )
    hbm_rows = _most_rows(tables, left)
    held = sum(sum(_rows_on_gpu(table, hbm_rows)) for table in tables)
    others = records - _bytes_on_gpu(tables, hbm_rows)
    need = f"{need}; {held:,} of them ({held / rows:.1%}) fit in the GPU's memory"
    host_bytes = int(memory * TABLES_SHARE)
    lack = others - host_bytes
    if lack > 0 and drive is not None:
        files = file_bytes(lack, (rows - held) * lack / others)
        if files <= drive.free:
            return Finding(
                "tables on a GPU",
                f"{need}, and the others in host memory and on the drive, in files of up to "
                f"{format_size(files)}",
                Status.NOTE,
                f"give the tables device='gpu', tiers={Tiers(host_bytes, str(drive.folder), hbm_rows)}",
            )
    if lack > 0:
        return Finding(
            "tables on a GPU",
            f"{need}, but the others take {format_size(others)} of host memory, which lacks "
            f"{format_size(lack)}"
            + ("" if drive is None else f", and files of up to {format_size(files)} on the drive"),
            Status.BROKEN,
            f"add {format_size(lack / TABLES_SHARE)} of memory, name a folder on a larger drive with --ssd, "
            "or train on ranks of more machines",
        )
    return Finding(
        "tables on a GPU",
        f"{need}, and the others in {format_size(others)} of host memory",
        Status.NOTE,
        f"give the tables device='gpu', tiers={Tiers(hbm_rows=hbm_rows)}",
    )


def index_bytes(rows: int) -> int:
    """Return the GPU memory that a table of many rows takes besides its records: 37 to 59 bytes a row."""
    return _slots(rows) * SLOT_BYTES + rows * (LIST_BYTES + HEADER_BYTES)


def growth_bytes(rows: int) -> int:
    """Return the extra bytes that a table takes while it grows: the part that it copies exists twice."""
    return min(_slots(rows) // 2, PART_SLOTS) * SLOT_BYTES + rows * LIST_BYTES


def _slots(rows: int) -> int:
    slots = FEWEST_SLOTS
    while slots // 4 * 3 < rows:
        slots *= 2
    return slots


def _most_rows(tables: Sequence[TableSize], left: int) -> int:
    """Return the largest ``hbm_rows`` with which the rows on the GPU take at most ``left`` bytes."""
    low, high = 1, 2 * max(table.rows for table in tables)  # half of these may be full rows
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _bytes_on_gpu(tables, middle) <= left else (low, middle - 1)
    return low


def _rows_on_gpu(table: TableSize, hbm_rows: int) -> tuple[int, int]:
    """Return how many full and half rows of a table are in the GPU's memory."""
    most = (hbm_rows + 1) // 2 if table.two_precisions else hbm_rows
    return min(table.rows - table.half_rows, most), min(table.half_rows, hbm_rows)


def _bytes_on_gpu(tables: Sequence[TableSize], hbm_rows: int) -> int:
    return sum(_bytes(table, *_rows_on_gpu(table, hbm_rows)) for table in tables)


def _bytes(table: TableSize, full: int, half: int) -> int:
    """Return the bytes of full and half records; both counts are rounded up to a multiple of four."""
    numbers = -(-table.floats // 4) * 4
    return full * 4 * numbers + half * 2 * numbers


PLACE_BYTES = 16  # of memory, at most, for each row on the drive
SEGMENT_BYTES = 32 << 20  # of memory, at most, for the segments that a table is filling

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def examine_tables(checkpoint: Path, ssd: Path | None, gpu_bytes: int | None = None) -> list[Finding]:
    """Report the memory that a checkpoint's tables need, what this machine has, and whether they fit.

    Tables that fit in host memory or on a GPU aren't `Status.BROKEN` because they don't fit in the other.

    Args:
      checkpoint: A checkpoint, or a folder of checkpoints, of which the latest is read.
      ssd: A folder on the drive that would hold rows; None: there is no such drive.
      gpu_bytes: The free memory of a GPU; None: that of this machine's GPUs, if it has any.

    Raises:
      DataError: There is no checkpoint, or it isn't complete.
      ConfigError: `ssd` isn't a folder, or can't be written to.
    """
    drive = None if ssd is None else find_drive(ssd)
    memory = available_memory()
    folder = find_checkpoint(checkpoint)
    tables = read_sizes(folder)
    share = f"{format_size(memory * TABLES_SHARE)} for tables, the rest for the process"
    findings = [
        Finding("checkpoint", str(folder)),
        *map(describe, tables),
        Finding("host memory", f"{format_size(memory)} available: {share}"),
    ]
    if drive is not None:
        findings.append(Finding("drive", f"{format_size(drive.free)} free in {drive.folder}"))
    verdicts = [judge(tables, memory, drive)]
    gpu = gpu_memory() if gpu_bytes is None else gpu_bytes
    if gpu is not None:
        share = f"{format_size(gpu * TABLES_SHARE)} for tables, the rest for the model"
        findings.append(Finding("gpu memory", f"{format_size(gpu)} available: {share}"))
        verdicts.append(judge_gpu(tables, gpu, memory, drive))
    if any(each.status is not Status.BROKEN for each in verdicts):
        verdicts = [replace(v, status=Status.NOTE) if v.status is Status.BROKEN else v for v in verdicts]
    return [*findings, *verdicts]


def judge(tables: Sequence[TableSize], memory: int, drive: Drive | None) -> Finding:
    """Report where tables fit: in memory, in `gmeta.policies.Tiers` (and which), or nowhere (and why).

    The tables are assumed to be one collection's, which divides ``host_bytes`` as `Tiers.divide` does.

    Args:
      tables: The tables.
      memory: Available bytes of host memory; tables may take `TABLES_SHARE` of them.
      drive: The drive that would hold rows, or None.
    """
    rows = sum(table.rows for table in tables)
    whole = sum(table.records for table in tables) + rows * INDEX_BYTES
    usable = int(memory * TABLES_SHARE)
    need = f"this model needs {rows:,} rows, {format_size(whole)} with their index"
    if whole <= usable:
        return Finding("tables", f"{need}; all of them fit in host memory")
    besides = rows * (INDEX_BYTES + PLACE_BYTES) + len(tables) * SEGMENT_BYTES
    host_bytes = usable - besides
    if host_bytes <= 0:
        lack = min(besides + 1, whole) / TABLES_SHARE - memory
        return Finding(
            "tables",
            f"{need}; they don't fit, nor would they in tiers: {format_size(besides)} stay in memory for the "
            f"index of all rows, and {format_size(usable)} are available",
            Status.BROKEN,
            f"add {format_size(lack)} of memory, train on ranks of more machines, or bound the rows "
            "(gmeta.policies.LRU)",
        )
    held, files = _divide(tables, host_bytes)
    need = f"{need}; {held / rows:.1%} of them fit in host memory"
    if drive is None:
        return Finding(
            "tables",
            f"{need}, and no drive is named for the others",
            Status.BROKEN,
            f"name a folder on a fast local drive that has {format_size(files)} free: --ssd FOLDER",
        )
    if files > drive.free:
        return Finding(
            "tables",
            f"{need}, but the drive lacks {format_size(files - drive.free)}: the files of the others take up "
            f"to {format_size(files)}, twice the bytes of the rows in them",
            Status.BROKEN,
            "free as much, or name a folder on another drive with --ssd",
        )
    return Finding(
        "tables",
        f"{need}, and the others on the drive, in files of up to {format_size(files)}",
        Status.NOTE,
        f"give the tables tiers={Tiers(host_bytes, str(drive.folder))}",
    )


def _divide(tables: Sequence[TableSize], host_bytes: int) -> tuple[int, int]:
    """Return how many rows are in memory, and the most bytes that files take for the other rows."""
    held, files = 0, 0
    shares = Tiers(host_bytes, "").divide([table.row_bytes for table in tables])
    for table, share in zip(tables, shares, strict=True):
        assert share.host_bytes is not None  # as it was given
        part = min(1.0, share.host_bytes / max(table.records, 1))
        held += int(part * table.rows)
        files += file_bytes((1 - part) * table.records, (1 - part) * table.rows)
    return held, files


def available_memory() -> int:
    """Return the bytes of memory that a new process can use, within the limits of machine and container."""
    there = _numbers(_MEMINFO)["MemAvailable:"] << 10
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cache = _numbers(_CGROUP / "memory.stat")["inactive_file"]  # the kernel frees it when it needs memory
    except (OSError, ValueError):  # no container, or "max"
        return there
    return min(there, max(limit - used + cache, 0))


def _numbers(path: Path) -> dict[str, int]:
    """Read a file of lines that each have a name and a number."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines}
