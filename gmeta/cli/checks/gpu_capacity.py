"""Compares the tables of a checkpoint with the memory of a GPU and of its host, for ``gmeta doctor``.

The index of all keys is in the GPU's memory, and so are ``hbm_rows`` rows of each table. The others are in
host memory (`gmeta.policies.Tiers`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from gmeta.checkpoint.files.contents import format_size
from gmeta.cli.checks.drives import Drive, file_bytes
from gmeta.cli.checks.installation import Finding, Status
from gmeta.cli.checks.table_sizes import TABLES_SHARE, TableSize
from gmeta.policies import Tiers

SLOT_BYTES = 16  # of the index
LIST_BYTES = 8  # a row's mark of use, and its place among the free numbers: lists that grow by copies
HEADER_BYTES = 8  # a row's frequency and last step, which stay on the GPU
FEWEST_SLOTS = 1024
PART_SLOTS = 1 << 20  # the index grows part by part, and a part has at most as many slots
BLOCK_BYTES = 4 << 20  # rows are allocated in blocks of at most as many bytes, if 32 rows don't take more


def gpu_memory() -> int | None:
    """Return the free bytes of the GPU that has the fewest, by nvidia-smi; None if there is no GPU."""
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
    """Say whether tables fit on a GPU, alone or with rows in other tiers, and how many rows then do.

    The tables are taken for those of one collection, which have the same ``hbm_rows`` each.

    Args:
      tables: The tables.
      gpu: Available bytes of the GPU's memory; tables may take `TABLES_SHARE` of them.
      memory: Available bytes of host memory; as much of them.
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
            f"{format_size(growth)} more while it grows, and {format_size(usable)} are there",
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
    """Return the bytes of GPU memory beside the records of a table that has grown to many: 37 to 59 a row."""
    return _slots(rows) * SLOT_BYTES + rows * (LIST_BYTES + HEADER_BYTES)


def growth_bytes(rows: int) -> int:
    """Return the bytes that such a table takes more while it grows: what it copies is there twice."""
    return min(_slots(rows) // 2, PART_SLOTS) * SLOT_BYTES + rows * LIST_BYTES


def _slots(rows: int) -> int:
    slots = FEWEST_SLOTS
    while slots // 4 * 3 < rows:
        slots *= 2
    return slots


def _most_rows(tables: Sequence[TableSize], left: int) -> int:
    """Return the largest ``hbm_rows`` with which the rows on the GPU take at most ``left`` bytes."""
    low, high = 1, 2 * max(table.rows for table in tables)  # of full rows, half as many may be there
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
    """Return the bytes of full and half records, whose numbers are padded to a multiple of four."""
    numbers = -(-table.floats // 4) * 4
    return full * 4 * numbers + half * 2 * numbers
