"""How kernels are timed: CUDA events around each call, after warm-up, on inputs that change."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

WARM_UP, RUNS = 10, 50


class Times(NamedTuple):
    """Seconds of a call.

    Attributes:
      p10: A tenth of the calls were faster.
      p50: The median.
    """

    p10: float
    p50: float


def timed(run: Callable[[int], object], runs: int = RUNS) -> Times:
    """Time ``run(i)`` for call number i."""
    for i in range(WARM_UP):
        run(i)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)
    ]
    for i, (start, end) in enumerate(events):
        start.record()
        run(WARM_UP + i)
        end.record()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 for start, end in events]
    return Times(statistics.quantiles(seconds, n=10)[0], statistics.median(seconds))


def copy_bandwidth(gibibytes: int = 4) -> float:
    """Bytes a second of a large copy on the GPU, those read and those written."""
    source = torch.randint(0, 1 << 60, (gibibytes << 27,), device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda _: target.copy_(source)).p50
