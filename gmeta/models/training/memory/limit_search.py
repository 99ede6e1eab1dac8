"""The largest batch within a budget of memory: a line through measured peaks, measured at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gmeta.core.errors import ConfigError

REACH = 8
"""How many times larger than anything measured the next batch may be."""

CLIMBS = 4
"""How often a batch that many times larger is tried before peaks count as not growing with tokens."""

TRIES = 8
"""How many smaller batches are tried after one that exceeds the budget."""

FIT_ERROR = 1e-9
"""The relative error that rounding may leave in a size from least squares; it differs between processors."""


@dataclass(frozen=True)
class MemoryLine:
    """Peak memory as a function of a batch's tokens, ``base + per_token * tokens``.

    Attributes:
      base: Bytes without a batch: weights, slots, what libraries hold.
      per_token: Bytes that each token adds.
    """

    base: float
    per_token: float

    @classmethod
    def through(cls, peaks: dict[int, float]) -> MemoryLine:
        """Return the line of least squares through peaks, tokens -> bytes; of one size from zero on."""
        if len(peaks) == 1:
            ((tokens, peak),) = peaks.items()
            return cls(0.0, peak / tokens)
        per_token, base = np.polyfit(list(peaks), list(peaks.values()), 1)
        return cls(float(base), float(per_token))

    def tokens_at(self, peak: float) -> int:
        """Return the tokens at which the line reaches a peak, rounded down.

        A size that is a whole number but for `FIT_ERROR` is that number, not the one below.
        """
        return math.floor((peak - self.base) / self.per_token * (1 + FIT_ERROR))


@dataclass(frozen=True)
class FoundLimit:
    """What `find_limit` found.

    Attributes:
      tokens: The largest number of tokens that was measured within the budget.
      peak: The peak measured with so many tokens, in bytes.
      line: Through all measured peaks.
      refused: The sizes that exceeded the budget, in the order of their measurement.
    """

    tokens: int
    peak: float
    line: MemoryLine
    refused: tuple[int, ...]


def find_limit(measure: Callable[[int], float | None], sizes: Sequence[int], budget: float) -> FoundLimit:
    """Find the most tokens whose peak memory stays within a budget.

    A line is put through the peaks of the first sizes. Where it reaches the budget, a batch is measured. If
    this exceeds the budget, the next size is where the chord between it and the largest size that fits
    reaches the budget: peaks that grow faster than a line, such as squares, lie below the chord. A size is
    returned only if its own peak was measured to fit.

    Args:
      measure: Tokens -> the peak in bytes; None if memory ran out. Each size is measured once.
      sizes: The first sizes, two or more, rising, well below the limit.
      budget: Bytes.

    Raises:
      ConfigError: The smallest size doesn't fit, or peaks don't grow with tokens.

    Example:
      >>> find_limit(lambda tokens: 100 + 2.0 * tokens, (1, 2, 4), 150).tokens
      25
    """
    search = _Search(measure, budget)
    for tokens in sizes:
        if not search.fits(tokens):
            break
    search.check_smallest(sizes[0])
    search.climb()
    search.shrink()
    line = MemoryLine.through(search.peaks)
    return FoundLimit(search.best, search.peaks[search.best], line, tuple(search.over))


class _Search:
    """What was measured so far."""

    def __init__(self, measure: Callable[[int], float | None], budget: float) -> None:
        self._measure, self._budget = measure, budget
        self.peaks: dict[int, float] = {}
        self.over: list[int] = []
        self.best = 0

    def fits(self, tokens: int) -> bool:
        """Measure a size, and return whether it stays within the budget."""
        peak = self._measure(tokens)
        if peak is not None:
            self.peaks[tokens] = peak
        fits = peak is not None and peak <= self._budget
        if fits:
            self.best = max(self.best, tokens)
        else:
            self.over.append(tokens)
        return fits

    def check_smallest(self, tokens: int) -> None:
        """Refuse a budget in which not even the smallest size fits."""
        if not self.best:
            peak = self.peaks.get(tokens)
            took = "ran out of memory" if peak is None else f"took {peak:,.0f} bytes"
            raise ConfigError(
                f"max_tokens: a batch of {tokens} tokens {took}, and the budget is {self._budget:,.0f}: give "
                "smaller sizes in tokens=, or make the model smaller"
            )

    def climb(self) -> None:
        """Measure where the line reaches the budget; a batch far larger than any so far comes in steps."""
        for _ in range(CLIMBS):
            if self.over:
                return
            line = MemoryLine.through(self.peaks)
            if line.per_token <= 0:
                break
            end = line.tokens_at(self._budget)
            aim = min(end, REACH * self.best)
            if aim <= self.best or (self.fits(aim) and aim == end):
                return
        if not self.over:
            measured = ", ".join(f"{peak:,.0f} with {tokens}" for tokens, peak in self.peaks.items())
            raise ConfigError(
                f"max_tokens: bytes in use don't grow with tokens ({measured}), so no limit follows from the "
                f"budget of {self._budget:,.0f}: give larger sizes in tokens=, and batches of so many"
            )

    def shrink(self) -> None:
        """While the smallest size measured last exceeds the budget, measure one below it."""
        for _ in range(TRIES):
            if not self.over:
                return
            upper, share = min(self.over), 0.5
            if upper in self.peaks:
                low = self.peaks[self.best]
                share = (self._budget - low) / (self.peaks[upper] - low)
            aim = self.best + min(int(share * (upper - self.best)), upper - self.best - 1)
            if aim <= self.best or self.fits(aim):
                return
