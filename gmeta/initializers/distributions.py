"""Initial rows of a `gmeta.ops.HashTable`.

Element j of the row of a key is a pure function of (initializer, table seed, key, j): counter-based random
numbers (Philox4x32-10), turned into the distribution by inversion. It never depends on rank, step or order
of insertion, and it is the same to the last bit on every machine. The formulas are in
``ops/table/core/initializer.h``; `gmeta.testing.reference.initial_rows` has them in NumPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from gmeta.core.errors import ConfigError


@dataclass(frozen=True)
class Initializer:
    """Base of the initializers."""

    kind: ClassVar[str]
    """Its name in the native op."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value):
                raise ConfigError(f"{type(self).__name__}: {field.name} must be finite, got {value}")

    @property
    def parameters(self) -> tuple[float, ...]:
        """What the native op is made with, in its order."""
        return tuple(float(getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True)
class Zeros(Initializer):
    """Rows of zeros."""

    kind: ClassVar[str] = "constant"

    @property
    def parameters(self) -> tuple[float, ...]:
        """The constant."""
        return (0.0,)


@dataclass(frozen=True)
class Constant(Initializer):
    """Rows of one value.

    Args:
      value: The value.
    """

    value: float = 0.0
    kind: ClassVar[str] = "constant"


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform in [low, high), at 2^24 equally spaced values.

    Args:
      low: Lower bound.
      high: Upper bound, above ``low``.
    """

    low: float = -0.05
    high: float = 0.05
    kind: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise ConfigError(f"Uniform: low must be below high, got low={self.low}, high={self.high}")


def _check_stddev(owner: Normal | TruncatedNormal) -> None:
    if owner.stddev < 0:
        raise ConfigError(f"{type(owner).__name__}: stddev must be >= 0, got {owner.stddev}")


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal; the farthest value that can occur is 5.3 standard deviations from the mean.

    Args:
      mean: Mean.
      stddev: Standard deviation, >= 0.
    """

    mean: float = 0.0
    stddev: float = 0.05
    kind: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stddev(self)


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normal, conditioned on lying within two standard deviations of the mean.

    Args:
      mean: Mean before truncation (and after: the bounds are symmetric).
      stddev: Standard deviation before truncation, >= 0.
    """

    mean: float = 0.0
    stddev: float = 0.05
    kind: ClassVar[str] = "truncated_normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stddev(self)
