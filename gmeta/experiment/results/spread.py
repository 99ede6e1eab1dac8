"""Mean and spread of a number that is measured once per seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds.

    Attributes:
      mean: Mean of the defined values; nan if there are none.
      deviation: Sample standard deviation, ``sqrt(sum (x - mean)^2 / (n - 1))``, in the metric's own unit;
        ``None`` if fewer than two values are defined. It says how far apart single runs lie, not how
        well the mean is known: for that, divide it by ``sqrt(n)``.
      defined: Number of values that are finite.
      total: Number of values, undefined ones included.

    Example:
      >>> Spread.of([0.75, 1.0, 1.25])
      Spread(mean=1.0, deviation=0.25, defined=3, total=3)
    """

    mean: float
    deviation: float | None
    defined: int
    total: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one value per seed; values that are not finite count in ``total`` only."""
        finite = [value for value in values if math.isfinite(value)]
        return cls(
            mean=statistics.fmean(finite) if finite else math.nan,
            deviation=statistics.stdev(finite) if len(finite) > 1 else None,
            defined=len(finite),
            total=len(values),
        )

    def parts(self, digits: int = 3) -> tuple[str, str]:
        """Format mean and spread as two texts: ``("0.917", "±.009")``.

        A spread of ``None`` is empty; an undefined mean is a dash. If only some seeds are defined, the spread
        ends with their number: ``"±.009 (2/3)"``.
        """
        if not self.defined:
            return "–", ""
        spread = "" if self.deviation is None else "±" + f"{self.deviation:.{digits}f}".removeprefix("0")
        if self.defined < self.total:
            spread += f" ({self.defined}/{self.total})"
        return f"{self.mean:.{digits}f}", spread

    def format(self, digits: int = 3) -> str:
        """Format mean and spread as one text, ``"0.917±.009"``."""
        return "".join(self.parts(digits))
