"""Admission policies: which ids get a row in a `gmeta.ops.HashTable`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gmeta.core.errors import ConfigError
from gmeta.policies.storage import check_whole


@dataclass(frozen=True)
class Admission:
    """Base of the admission policies: which missing ids of an inserting lookup get a row.

    An id that is rejected reads its initial row, and no row is created. Its gradient has no effect and is
    counted in ``statistics().ignored``, and its lookup in ``misses`` and ``rejects``.
    """

    kind: ClassVar[str]
    """The name in the native op."""

    @property
    def settings(self) -> tuple[float, ...]:
        """The parameters of the native op."""
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

    It has m one-byte counters, and each id has k of them; the id's count is the smallest of its k
    (conservative update: only the smallest are incremented). Counts are never too low. One is too high only
    if other ids share all k of its counters; after ``n`` distinct ids that were rejected at least once, the
    probability of this is at most::

      (1 - exp(-k * n / m))^k        k = round(log2(1 / error)), m = -k * n / ln(1 - error^(1 / k))

    which is ``error`` at ``n = capacity`` (Fan et al., "Summary Cache", 2000, section V; Estan and Varghese,
    2002, for the conservative update). Beyond the capacity it grows by that formula.

    Args:
      capacity: The number of distinct ids up to which the error holds.
      error: The probability that an id is admitted too early, in (0, 1).

    Example:
      >>> round(Bloom(capacity=1_000_000, error=0.01).counters_per_id, 2)  # bytes per id
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
        """The number of counters of an id, the formula's k."""
        return max(1, round(math.log2(1.0 / self.error)))

    @property
    def counters_per_id(self) -> float:
        """Bytes per id at the capacity, the formula's m / n."""
        return -self.hashes / math.log1p(-(self.error ** (1.0 / self.hashes)))


@dataclass(frozen=True)
class CountAdmission(Admission):
    """An id gets a row when it is missing for the ``threshold``-th time.

    `HashTable.lookup_keys` counts each occurrence of a missing id, in the order of the batch.
    `HashTable.lookup` deduplicates ids first, so it counts batches. The lookup that admits an id creates its
    row, with frequency 1. Checkpoints of every kind hold the counts, so a run that resumes from one admits
    the same ids.

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
        """The name in the native op."""
        return "count" if self.filter is None else "filter"

    @property
    def settings(self) -> tuple[float, ...]:
        """The parameters of the native op."""
        if self.filter is None:
            return (self.threshold,)
        return (self.threshold, self.filter.capacity, self.filter.counters_per_id, self.filter.hashes)


@dataclass(frozen=True)
class ProbabilityAdmission(Admission):
    """A missing id gets a row with probability ``p``.

    The decision is a pure function of (table seed, id, table step): each step at which an id is missing is an
    independent trial, so an id is admitted after ``1 / p`` such steps on average, and lookups of one step
    agree. Nothing is kept for rejected ids. In a table whose step never changes (no ``apply_gradients``), the
    decision is final.

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
        """The parameters of the native op."""
        return (float(self.p),)
