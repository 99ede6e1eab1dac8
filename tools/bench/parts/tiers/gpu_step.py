"""Part step: a table's steps beside computation of a set time, and the bound by bus and computation."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence

import torch
from harness import Result
from parts.tiers.gpu_rows import LOOKAHEAD, Rows, Zipf
from parts.tiers.gpu_work import Work, bus_rate, step_seconds
from parts.tiers.zipf import che

DIM = 64
_STEPS = 12  # of a round
_OVER_BUS, _OVER = 1.25, 1.05


def measure(given: Namespace, note: Callable[..., None]) -> None:
    """Measure each skew."""
    rows, batch = given.rows, given.batch
    rate = bus_rate()
    work = Work(given.compute)
    note(Result("tiers/bus", rate, "B/s"))
    for cache in given.caches:
        whole = Rows(rows, DIM, batch)
        tiered = Rows(rows, DIM, batch, rows * cache // 100)
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
    warm = min(given.warm, math.ceil(2 * che(rows, rows * cache // 100, skew, batch).batches))
    for _ in range(0, warm, _STEPS):
        keys = [torch.unique(draw.keys(batch)) for _ in range(_STEPS + LOOKAHEAD)]
        steps(tiered, keys, gradients, lambda: None)
    seconds: dict[str, list[float]] = {"tiers": [], "hbm": [], "compute": []}
    moved = {"brought": 0, "spilled": 0, "crowded": 0}
    asked = 0
    for number in range(1 + given.rounds):
        keys = [torch.unique(draw.keys(batch)) for _ in range(_STEPS + LOOKAHEAD)]
        asked += sum(map(len, keys)) if number else 0
        before = tiered.moves()
        took = {"tiers": steps(tiered, keys, gradients, work.run)}
        after = tiered.moves()
        took["hbm"] = steps(whole, keys, gradients, work.run)
        took["compute"] = step_seconds(lambda _: work.run(), _STEPS)
        if number:
            for name, each in took.items():
                seconds[name] += each
            moved = {name: moved[name] + after[name] - before[name] for name in moved}
    times = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    a_step = (moved["brought"] + moved["spilled"]) * tiered.row_bytes
    a_step /= given.rounds * (_STEPS + LOOKAHEAD)
    bound = _OVER * max(times["hbm"], _OVER_BUS * 1e3 * a_step / rate)
    name = f"tiers/table_step/zipf{skew:g}/cache{cache}"
    return [
        Result(name, times["tiers"], "ms", "the bound", bound),
        Result(f"{name}/hbm", times["hbm"], "ms"),
        Result(f"{name}/compute", times["compute"], "ms"),
        Result(f"{name}/longest", 1e3 * max(seconds["tiers"]), "ms"),
        Result(f"{name}/moved", a_step, "B"),
        Result(f"{name}/bus", 1e3 * a_step / rate, "ms"),
        Result(f"{name}/hits", 100 - 100 * (moved["brought"] + moved["crowded"]) / asked, "%"),
        Result(f"{name}/crowded", 100 * moved["crowded"] / asked, "% of the keys"),
        Result(f"{name}/distinct", asked / given.rounds / (_STEPS + LOOKAHEAD), "keys"),
        Result(f"{name}/warm", warm, "batches"),
    ]


def steps(
    table: Rows, keys: Sequence[torch.Tensor], gradients: torch.Tensor, compute: Callable[[], None]
) -> list[float]:
    """Take a step for each batch, and return their seconds; beside the last ones nothing is brought."""

    def step(number: int) -> None:
        if number + LOOKAHEAD < len(keys):
            table.prefetch(keys[number + LOOKAHEAD])
        table.look_up(keys[number])
        compute()
        table.update(keys[number], gradients)

    torch.cuda.synchronize()
    for first in keys[:LOOKAHEAD]:
        table.prefetch(first)
    return step_seconds(step, len(keys))
