"""Which ids a `gmeta.ops.HashTable` gives a row of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gmeta.core.errors import ConfigError
from gmeta.policies.storage import check_whole


@dataclass(frozen=True)
class Admission:
    """Base of the admission policies: which missing ids of an inserting lookup get a row.

    An id that is turned away reads its initial row and trains nothing: no row is made, its gradient is
    counted in ``statistics().ignored``, and the lookup in ``misses`` and ``rejects``.
    """

    kind: ClassVar[str]
    """Its name in the native op."""

    @property
    def settings(self) -> tuple[float, ...]:
        """What the native op is made with."""
        return ()


@dataclass(frozen=True)
class Always(Admission):
    """Every id gets a row when it is first seen.

    Example:
      >>> Always() == Always()
      True
    """

    kind: ClassVar[str] = "all"


@dataclass(frozen=True)
class Bloom:
    """A counting Bloom filter, for `CountAdmission` in bounded memory.

    It has m one-byte counters, and an id has k of them; the id's count is the least of its k (conservative
    update: only the least are raised). Counts are never too low. One is too high only if other ids have met
    all k of its counters; after ``n`` distinct ids that were turned away at least once, this has at most the
    probability::

      (1 - exp(-k * n / m))^k        k = round(log2(1 / error)), m = -k * n / ln(1 - error^(1 / k))

    which is ``error`` at ``n = capacity`` (Fan et al., "Summary Cache", 2000, section V; Estan and Varghese,
    2002, for the conservative update). Beyond the capacity it goes up by that formula.

    Args:
      capacity: Distinct ids up to which the error holds.
      error: The probability that an id is admitted before its time, in (0, 1).

    Example:
      >>> round(Bloom(capacity=1_000_000, error=0.01).counters_per_id, 2)  # bytes an id
      9.59
    """

    capacity: int
    error: float = 0.01

    def __post_init__(self) -> None:
        check_whole(self, "capacity", self.capacity, 1, 2**40)
        if not 0.0 < self.error < 1.0:
            raise ConfigError(f"Bloom: error must lie in (0, 1), got {self.error}")

    @property
    def hashes(self) -> int:
        """Counters that an id has, the formula's k."""
        return max(1, round(math.log2(1.0 / self.error)))

    @property
    def counters_per_id(self) -> float:
        """Bytes an id at the capacity, the formula's m / n."""
        return -self.hashes / math.log1p(-(self.error ** (1.0 / self.hashes)))


@dataclass(frozen=True)
class CountAdmission(Admission):
    """An id gets a row when it is missing for the ``threshold``-th time.

    Each occurrence of a missing id in `HashTable.lookup_keys` counts, in the order of the batch; since
    `HashTable.lookup` makes ids distinct first, there it is the number of batches that count. The lookup that
    admits an id makes its row, of frequency 1. Checkpoints of every kind carry the counts: a run that goes on
    from one admits what it would have admitted.

    Args:
      threshold: >= 1; with a filter, at most 255.
      filter: None counts exactly, in 21 to 64 bytes for each id that waits (an id that never occurs again
        waits forever); an id whose row is evicted is counted from 0 again. A `Bloom` filter bounds the memory
        at a stated error, and forgets nothing: an id whose row was evicted gets a row at once.

    Example:
      >>> CountAdmission(3, filter=Bloom(capacity=10_000_000, error=0.01)).kind
      'filter'
    """

    threshold: int
    filter: Bloom | None = None

    def __post_init__(self) -> None:
        check_whole(self, "threshold", self.threshold, 1, 255 if self.filter else 2**32 - 1)

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Its name in the native op."""
        return "count" if self.filter is None else "filter"

    @property
    def settings(self) -> tuple[float, ...]:
        """What the native op is made with."""
        if self.filter is None:
            return (self.threshold,)
        return (self.threshold, self.filter.capacity, self.filter.counters_per_id, self.filter.hashes)


@dataclass(frozen=True)
class ProbabilityAdmission(Admission):
    """A missing id gets a row with probability ``p``.

    The verdict is a pure function of (table seed, id, table step): each step at which an id is missing is an
    independent trial, so ids that come often get in after ``1 / p`` steps on average; lookups of one step
    agree. Nothing is kept for ids that are turned away. In a table whose step never moves (no
    ``apply_gradients``), a verdict is final.

    Args:
      p: In [0, 1].

    Example:
      >>> ProbabilityAdmission(0.1).settings
      (0.1,)
    """

    p: float
    kind: ClassVar[str] = "chance"

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise ConfigError(f"ProbabilityAdmission: p must lie in [0, 1], got {self.p}")

    @property
    def settings(self) -> tuple[float, ...]:
        """What the native op is made with."""
        return (float(self.p),)
