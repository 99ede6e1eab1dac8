"""Part drive: a table's steps with rows in three tiers, half of them on a drive."""

from __future__ import annotations

import math
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Result
from parts.tiers.drive import BLOCK, Drive, read_bytes, written_bytes
from parts.tiers.gpu_rows import LOOKAHEAD, Rows, Zipf
from parts.tiers.gpu_step import steps
from parts.tiers.gpu_work import Work
from parts.tiers.zipf import che

DIM = 64
_STEPS = 12  # of a round
_READS, _FILE = 20_000, 1 << 30  # of the drive's own rate
_ON_DRIVE = 50  # percent of the rows
_OVER = 1.05


def measure(given: Namespace, note: Callable[..., None]) -> None:
    """Measure the share of rows in the GPU's memory and each skew."""
    rows, batch = given.rows, given.batch
    work = Work(given.compute)
    with tempfile.TemporaryDirectory() as folder:
        drive = Drive(Path(folder), _FILE if rows > 1_000_000 else 1 << 24)
        rate = statistics.median(drive.reads(_READS) for _ in range(3))
        note(Result("tiers/drive", rate, "reads of 4 KiB/s"))
        for cache in given.caches:
            whole = Rows(rows, DIM, batch)
            host_bytes = rows * (100 - _ON_DRIVE - cache) // 100 * whole.row_bytes
            tiered = Rows(rows, DIM, batch, rows * cache // 100, host_bytes, folder)
            for skew in given.skews:
                note(*_of_skew(given, skew, cache, (whole, tiered), work, rate))
            del whole, tiered


def _of_skew(
    given: Namespace, skew: float, cache: int, tables: tuple[Rows, Rows], work: Work, rate: float
) -> list[Result]:
    rows, batch = given.rows, given.batch
    whole, tiered = tables
    draw = Zipf(rows, skew)
    gradients = torch.randn((batch, DIM), device="cuda")
    warm = min(given.warm, math.ceil(2 * che(rows, rows * (100 - _ON_DRIVE) // 100, skew, batch).batches))
    for _ in range(0, warm, _STEPS):
        steps(tiered, [draw.distinct(batch) for _ in range(_STEPS + LOOKAHEAD)], gradients, lambda: None)
    seconds: dict[str, list[float]] = {"tiers": [], "late": [], "hbm": []}
    read = written = spilled = 0
    for number in range(1 + given.rounds):
        keys = {name: [draw.distinct(batch) for _ in range(_STEPS + LOOKAHEAD)] for name in seconds}
        before = read_bytes()
        took = {"tiers": steps(tiered, keys["tiers"], gradients, work.run)}
        if number:
            read += read_bytes() - before
        tiered.tiered = False
        went, before = tiered.moves()["spilled"], written_bytes()
        took["late"] = steps(tiered, keys["late"], gradients, work.run)
        if number:
            # Without prefetches, rows leave host memory for the drive and no other memory.
            spilled += tiered.moves()["spilled"] - went
            written += written_bytes() - before
        tiered.tiered = True
        took["hbm"] = steps(whole, keys["hbm"], gradients, work.run)
        if number:
            for name, each in took.items():
                seconds[name] += each
    # Not medians: they would hide the wait of steps that send rows to the drive.
    times = {name: 1e3 * statistics.fmean(each) for name, each in seconds.items()}
    a_step = read / BLOCK / given.rounds / (_STEPS + LOOKAHEAD)
    bound = _OVER * max(times["hbm"], 1e3 * a_step / rate)
    name = f"tiers/drive_step/zipf{skew:g}/cache{cache}"
    counted = tiered.table.statistics()
    went_there = spilled * tiered.row_bytes
    amplified = [written / went_there] if went_there else []  # a few steps may need no room
    return [
        Result(name, times["tiers"], "ms", "the bound", bound),
        Result(f"{name}/median", 1e3 * statistics.median(seconds["tiers"]), "ms"),
        Result(f"{name}/longest", 1e3 * max(seconds["tiers"]), "ms"),
        Result(f"{name}/late", times["late"], "ms"),
        Result(f"{name}/hbm", times["hbm"], "ms"),
        Result(f"{name}/read", a_step, "blocks of 4 KiB"),  # including those of collected segments
        Result(f"{name}/drive", 1e3 * a_step / rate, "ms"),
        Result(f"{name}/on_drive", 100 * counted["disk_rows"] / rows, "% of the rows"),
        Result(f"{name}/warm", warm, "batches"),
        *(Result(f"{name}/amplification", each, "bytes written/moved") for each in amplified),
    ]
