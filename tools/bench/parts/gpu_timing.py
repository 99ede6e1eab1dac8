"""How kernels are timed: CUDA events around each call, after warm-up, on inputs that change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

WARM_UP, RUNS = 10, 50
SLOW = 25e-3  # seconds of a call, above which fewer are made


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


def in_turn(calls: Mapping[str, Callable[[], object]], runs: int) -> dict[str, tuple[float, float]]:
    """Name -> the tenth percentile and the median of seconds; calls take turns."""
    plans: dict[str, tuple[int, int]] = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        slow = time.perf_counter() - start > SLOW
        plans[name] = (3, 3 + min(runs, 12)) if slow else (10, 10 + runs)
    found: dict[str, list[Any]] = {name: [] for name in calls}
    for number in range(10 + runs):
        for name, call in calls.items():
            warm, end = plans[name]
            if number >= end:
                continue
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            call()
            pair[1].record()
            if number >= warm:
                found[name].append(pair)
    torch.cuda.synchronize()
    times = {name: [a.elapsed_time(b) / 1e3 for a, b in pairs] for name, pairs in found.items()}
    return {name: (statistics.quantiles(of, n=10)[0], statistics.median(of)) for name, of in times.items()}


def copy_bandwidth(gibibytes: int = 4) -> float:
    """Bytes a second of a large copy on the GPU, counting those read and those written."""
    source = torch.randint(0, 1 << 60, (gibibytes << 27,), device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda _: target.copy_(source)).p50
