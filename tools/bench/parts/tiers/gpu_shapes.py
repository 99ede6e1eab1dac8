"""Part shapes: lookup and update of batches as large as those of 9N-LLM's table 1.

The paper gives sequences a batch, their length, the width of a row, and milliseconds of a step's lookup and
update; not the ids, the rows, the optimizer, nor which GPUs and how many. Assumed here: one GPU, ids by
Zipf's law with 1.05 over 24 M rows of width 128 or 12 M of 256, Adam, a tenth of the rows in HBM. Lookup:
distinct keys, their rows, rows to positions; update: gradients of positions to rows, Adam.
"""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from harness import Result
from parts.tiers.gpu_rows import LOOKAHEAD, Distinct, Rows, Zipf, gather
from parts.tiers.gpu_work import Work
from parts.tiers.zipf import che

SKEW = 1.05
_STEPS = 6  # of a round


class Shape(NamedTuple):
    """A row of the paper's table: the shape, and the milliseconds before and after."""

    sequences: int
    length: int
    dim: int
    before: float
    after: float


SHAPES = (
    Shape(32, 4000, 128, 13, 5),
    Shape(128, 4000, 128, 24, 14),
    Shape(65_536, 10, 128, 28, 24),
    Shape(256, 4000, 256, 54, 32),
)


def measure(given: Namespace, note: Callable[..., None]) -> None:
    """Measure the shapes; those of equal width share their tables."""
    work = Work(given.compute)
    for dim in sorted({shape.dim for shape in SHAPES}):
        shapes = [shape for shape in SHAPES if shape.dim == dim]
        rows, most = given.rows * 128 // dim, max(_size(given, shape) for shape in shapes)
        for cache in given.caches:
            tables = {"tiers": Rows(rows, dim, most, rows * cache // 100), "hbm": Rows(rows, dim, most)}
            for shape in shapes:
                warm = math.ceil(2 * che(rows, rows * cache // 100, SKEW, _size(given, shape)).batches)
                note(*_of_shape(given, shape, cache, tables, rows, min(given.warm, warm), work))
            del tables


def _size(given: Namespace, shape: Shape) -> int:
    return given.batch or shape.sequences * shape.length


def _of_shape(
    given: Namespace, shape: Shape, cache: int, tables: dict[str, Rows], rows: int, warm: int, work: Work
) -> list[Result]:
    size = _size(given, shape)
    draw, distinct = Zipf(rows, SKEW), Distinct(size)
    values = torch.randn((size, shape.dim), device="cuda")
    for _ in range(0, warm, _STEPS):
        batches = [draw.keys(size) for _ in range(_STEPS)]
        steps(tables["tiers"], batches, distinct, values, lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in tables}
    found: list[int] = []
    for number in range(1 + given.rounds):
        batches = [draw.keys(size) for _ in range(_STEPS)]
        for name, table in tables.items():
            took = steps(table, batches, distinct, values, work.run)
            seconds[name] += took if number else []
        found.append(len(torch.unique(batches[0])))
    times = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    name = f"tiers/9n/sequences{shape.sequences}/length{shape.length}/dim{shape.dim}/cache{cache}"
    return [
        Result(name, times["tiers"], "ms", "9N-LLM's paper", shape.after),
        Result(f"{name}/before", times["tiers"], "ms", "open source, there", shape.before),
        Result(f"{name}/hbm", times["hbm"], "ms"),
        Result(f"{name}/distinct", 100 * statistics.median(found) / size, "% of the keys"),
    ]


def steps(
    table: Rows,
    batches: Sequence[torch.Tensor],
    distinct: Distinct,
    values: torch.Tensor,
    compute: Callable[[], None],
) -> list[float]:
    """Take a step for each batch, and return the GPU's seconds of its lookup and update.

    Rows are written to positions in ``values``, which then serve as gradients. Keys to bring are made
    distinct beforehand.
    """
    later = [torch.unique(keys) for keys in batches]
    torch.cuda.synchronize()
    for first in later[:LOOKAHEAD]:
        table.prefetch(first)
    torch.cuda.synchronize()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in batches]
    for number, (keys, (start, found, back, end)) in enumerate(zip(batches, marks, strict=True)):
        if number + LOOKAHEAD < len(later):
            table.prefetch(later[number + LOOKAHEAD])
        start.record()
        own, inverse = distinct.of(keys)
        gather(table.look_up(own), inverse, values)
        found.record()
        compute()
        back.record()
        table.update_positions(own, values, inverse)
        end.record()
    torch.cuda.synchronize()
    return [(a.elapsed_time(b) + c.elapsed_time(d)) / 1e3 for a, b, c, d in marks]
