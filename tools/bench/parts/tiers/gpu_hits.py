"""Part hits: the share of a batch's distinct keys in the GPU's memory before the batch was prefetched."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import deque
from collections.abc import Callable

import torch
from harness import Result
from parts.tiers.gpu_rows import LOOKAHEAD, Rows, Zipf
from parts.tiers.zipf import che

DIM = 8
_COUNTED = 50  # batches


def measure(given: Namespace, note: Callable[..., None]) -> None:
    """Measure each share of the rows and each skew."""
    rows, batch = given.rows, given.batch
    for cache in given.caches:
        table = Rows(rows, DIM, batch, rows * cache // 100)
        gradients = torch.randn((batch, DIM), device="cuda")
        for skew in given.skews:
            expected = che(rows, rows * cache // 100, skew, batch)
            warm = min(given.warm, math.ceil(2 * expected.batches))
            draw = Zipf(rows, skew)
            waiting: deque[torch.Tensor] = deque()
            asked, before = 0, table.moves()
            for number in range(LOOKAHEAD + warm + _COUNTED):
                if number == LOOKAHEAD + warm:
                    asked, before = 0, table.moves()
                waiting.append(torch.unique(draw.keys(batch)))
                asked += len(waiting[-1])
                torch.cuda.synchronize()
                table.prefetch(waiting[-1])
                if number >= LOOKAHEAD:
                    _train(table, waiting.popleft(), gradients)
            for keys in waiting:  # so that none of their rows stays pinned
                _train(table, keys, gradients)
            moved = {name: count - before[name] for name, count in table.moves().items()}
            missed = 100 * (moved["brought"] + moved["crowded"]) / asked
            name = f"tiers/hits/zipf{skew:g}/cache{cache}"
            note(
                Result(name, 100 - missed, "%", "Che's approximation", 100 * expected.hits),
                Result(f"{name}/crowded", 100 * moved["crowded"] / asked, "% of the keys"),
                Result(f"{name}/warm", warm, "batches"),
            )
        del table


def _train(table: Rows, keys: torch.Tensor, gradients: torch.Tensor) -> None:
    table.look_up(keys)
    table.update(keys, gradients)
