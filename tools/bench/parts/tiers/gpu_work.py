"""References for moves of rows: computation of a set time, and the best rate of the bus."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

_SIZE, _COPY = 4096, 256 << 20


class Work:
    """As many products of bfloat16 matrices as take a set time.

    Args:
      milliseconds: The approximate time.
    """

    def __init__(self, milliseconds: float) -> None:
        self._a = torch.randn((_SIZE, _SIZE), device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty_like(self._a)
        self.count = 1
        once = statistics.median(step_seconds(lambda _: self.run(), 20)[5:])
        self.count = max(1, round(milliseconds / 1e3 / once))

    def run(self) -> None:
        """Queue the products."""
        for _ in range(self.count):
            torch.matmul(self._a, self._a, out=self._out)


def step_seconds(step: Callable[[int], object], count: int) -> list[float]:
    """Queue steps one after another, and return the GPU's seconds of each."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for number in range(count):
        step(number)
        events[number + 1].record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def bus_rate(rounds: int = 7) -> float:
    """Return the bytes a second that copies between pinned host memory and the GPU move, both ways."""
    there, here = (torch.empty(_COPY, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    down, up = (torch.empty(_COPY, dtype=torch.uint8, device="cuda") for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]
    times = []
    for _ in range(2 + rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            with torch.cuda.stream(streams[0]):
                down.copy_(there, non_blocking=True)
            with torch.cuda.stream(streams[1]):
                here.copy_(up, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 8 * _COPY / statistics.median(times[2:])
