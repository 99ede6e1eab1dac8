"""Compares the tables of a checkpoint with the memory and the drive of this machine, for ``gmeta doctor``.

It loads no TensorFlow. `gmeta.cli.checks.gpu_capacity` does the same for tables on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gmeta.checkpoint.files.contents import find_checkpoint, format_size
from gmeta.cli.checks.drives import Drive, file_bytes, find_drive
from gmeta.cli.checks.gpu_capacity import gpu_memory, judge_gpu
from gmeta.cli.checks.installation import Finding, Status
from gmeta.cli.checks.table_sizes import INDEX_BYTES, TABLES_SHARE, TableSize, describe, read_sizes
from gmeta.policies import Tiers

PLACE_BYTES = 16  # of memory, at most, for a row on the drive
SEGMENT_BYTES = 32 << 20  # of memory, at most, for the segments of a table that fill

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def examine_tables(checkpoint: Path, ssd: Path | None, gpu_bytes: int | None = None) -> list[Finding]:
    """Say what a checkpoint's tables need, what this machine has, and whether the tables fit.

    Tables that fit in host memory or on a GPU aren't `Status.BROKEN` because they don't fit in the other.

    Args:
      checkpoint: A checkpoint, or a folder of checkpoints, whose latest one is taken.
      ssd: A folder on the drive that would hold rows; None: there is no such drive.
      gpu_bytes: The free memory of a GPU; None: that of this machine's GPUs, if it has any.

    Raises:
      DataError: There is no checkpoint, or it isn't whole.
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
    """Say where tables fit: in memory; in `gmeta.policies.Tiers`, and in which; or nowhere, and what lacks.

    The tables are taken for those of one collection, which divides ``host_bytes`` as `Tiers.divide` does.

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
            f"index of all rows, and {format_size(usable)} are there",
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
    """Return how many rows are in memory, and how many bytes the files of the others take at most."""
    held, files = 0, 0
    shares = Tiers(host_bytes, "").divide([table.row_bytes for table in tables])
    for table, share in zip(tables, shares, strict=True):
        assert share.host_bytes is not None  # as it was given
        part = min(1.0, share.host_bytes / max(table.records, 1))
        held += int(part * table.rows)
        files += file_bytes((1 - part) * table.records, (1 - part) * table.rows)
    return held, files


def available_memory() -> int:
    """Return the bytes of memory that a new process can have, by the machine and by its container's limit."""
    there = _numbers(_MEMINFO)["MemAvailable:"] << 10
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cache = _numbers(_CGROUP / "memory.stat")["inactive_file"]  # the kernel drops it when it needs memory
    except (OSError, ValueError):  # no container, or "max"
        return there
    return min(there, max(limit - used + cache, 0))


def _numbers(path: Path) -> dict[str, int]:
    """Read a file of lines that each have a name and a number."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines}
