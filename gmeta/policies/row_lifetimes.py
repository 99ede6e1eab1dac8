"""The lifetimes of rows: which ids get a row in a `gmeta.ops.HashTable`, and which rows it removes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from gmeta.core.errors import ConfigError
from gmeta.core.settings import parse_duration
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


ROW_INDEX_BYTES = 48
"""Bytes per row that a bound in bytes counts beside the record, for the row's share of the key index.

It is the same on any device, so that the same rows are evicted. In host memory the index takes at most 28
bytes for a row of a large table.
"""


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """Base of the eviction policies: which rows are removed, with their optimizer state.

    Inserting lookups keep the bound before they insert a batch's own ids, so one batch's insertions may
    exceed it. To keep the work of a batch small and even, the bound is divided among the table's S shards
    (64; fewer if the bound is below 65,536 rows, so that a share is at least 1,024 rows). If shard i is above
    its high mark when a batch reaches it, it evicts down to its low mark, the rows of the lowest rank first,
    and of equal rank the lower id::

    share = bound // S;  slack = share // 16;  high = share - slack * i // S;  low = high - slack

    So a full table holds between 87% and 100% of its bound, less the unevenness of the hash. With both
    bounds, a shard that is above either high mark evicts down to both low marks. `HashTable.evict` does the
    same in all shards.

    Args:
      max_rows: Bound on the rows of the table; None: no such bound.
      max_bytes: Bound on the memory of the table; a row counts as its record (8 bytes + 4 for each weight
        and slot) plus 48 bytes for the key index. None: no such bound.
    """

    max_rows: int | None = None
    max_bytes: int | None = None

    kind: ClassVar[str]
    """The name in the native op."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_bytes"):
            if getattr(self, name) is not None:
                check_whole(self, name, getattr(self, name), 1, 2**53)
        if self.kind in ("age", "frequency") and self.max_rows is None and self.max_bytes is None:
            raise ConfigError(
                f"{type(self).__name__}: give max_rows or max_bytes: without a bound nothing is evicted"
            )

    @property
    def settings(self) -> tuple[float, ...]:
        """The parameters of the native op: bounds (0: none), steps between sweeps, the policy's own."""
        return (self.max_rows or 0, self.max_bytes or 0, 0)


@dataclass(frozen=True, kw_only=True)
class LRU(Eviction):
    """Evicts the least recently used rows first: by last step, then by frequency, then by id.

    A use is an inserting lookup or an update; the last step is the table's step at that time.

    Args:
      max_rows: Bound on the rows; see `Eviction`.
      max_bytes: Bound on the memory; see `Eviction`.

    Raises:
      ConfigError: Neither bound is given.

    Example:
      >>> LRU(max_rows=10_000_000)
      LRU(max_rows=10000000, max_bytes=None)
    """

    kind: ClassVar[str] = "age"


@dataclass(frozen=True, kw_only=True)
class LFU(Eviction):
    """Evicts the least frequently used rows first: by frequency, then by last step, then by id.

    The frequency is the number of inserting lookups that have read the row since it was created; it doesn't
    decay.

    Args:
      max_rows: Bound on the rows; see `Eviction`.
      max_bytes: Bound on the memory; see `Eviction`.

    Raises:
      ConfigError: Neither bound is given.

    Example:
      >>> LFU(max_bytes=8 << 30).max_bytes
      8589934592
    """

    kind: ClassVar[str] = "frequency"


@dataclass(frozen=True, kw_only=True)
class TTL(Eviction):
    """Time to live: evicts rows that were last used more than ``steps`` steps, or ``seconds``, ago.

    By steps, a row with ``last_step < step - steps`` is removed at the next sweep of its shard, and can be
    read until then. Shard i of S is swept at the end of the ``apply_gradients`` that brings the step to
    ``(step + every * i // S) % every == 0``, so an update makes few sweeps; `HashTable.evict` sweeps all.
    Under a bound, rows are evicted as in `LRU`.

    By seconds, the age of a row is measured by the table's clock (`HashTable.clock`), which is read at each
    update: the machine's time, unless you set another, such as the time of the events that are read. A row
    is never removed before it has been unused for ``seconds``. An update removes it at most
    ``seconds / 64 + every`` later, plus the time between two updates. Shards are swept one after another,
    each once in ``every``. While training is stopped, time goes on: the first update after a pause sweeps
    all shards if the pause was longer than ``every``. A clock that goes back counts as one that stood still.
    Each rank reads its own clock and sweeps the rows that it owns, so the rows of N ranks are those of one
    rank if the clocks agree; otherwise, a row is swept earlier or later by the difference of the clocks.
    Checkpoints hold the times; rows of a checkpoint without them (of a table with another eviction, or whose
    features were merged differently) count as used at the first update.

    Args:
      steps: The number of steps without use that a row survives, >= 1. Give either this or ``seconds``.
      seconds: The time without use that a row survives, such as ``"7d"`` or ``3600``.
      every: The time between sweeps of a shard, in the unit of the lifetime: steps, >= 1, or a time such as
        ``"1h"``. None: an eighth of the lifetime; at least 1 step.
      max_rows: Bound on the rows; see `Eviction`.
      max_bytes: Bound on the memory; see `Eviction`.

    Raises:
      ConfigError: Neither or both of ``steps`` and ``seconds`` are given, or a value is out of range.

    Example:
      >>> TTL(steps=1000).settings
      (0, 0, 125, 1000)
      >>> TTL(seconds="7d").interval
      75600.0
    """

    steps: int | None = None
    seconds: str | float | None = None
    every: int | str | float | None = None
    kind: ClassVar[str] = "expired"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError(
                f"TTL: give either steps or seconds, got steps={self.steps}, seconds={self.seconds!r}"
            )
        if self.steps is not None:
            check_whole(self, "steps", self.steps, 1, 2**32 - 1)
            if self.every is not None:
                check_whole(self, "every", self.every, 1, 2**32 - 1)
            return
        for name, value in (("seconds", self.lifetime), ("every", self.interval)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, value)  # so that "1d" equals "24h"
            if not 1e-6 <= value <= _MOST_SECONDS:
                raise ConfigError(
                    f"TTL: {name} must be a time from 1e-6 to {_MOST_SECONDS:.0e} seconds, got "
                    f"{getattr(self, name)!r}"
                )

    @property
    def lifetime(self) -> float:
        """The time without use that a row survives, in seconds, if it is given in seconds."""
        return _to_seconds(self.seconds, "TTL: seconds")

    @property
    def interval(self) -> float:
        """The time between sweeps of a shard in seconds, if the lifetime is in seconds."""
        return self.lifetime / 8 if self.every is None else _to_seconds(self.every, "TTL: every")

    @property
    def settings(self) -> tuple[float, ...]:
        """The parameters of the native op; a table with a clock itself decides when to sweep."""
        if self.steps is None:
            return (*super().settings[:2], 0, 0)
        every = self.every if isinstance(self.every, int) else max(1, self.steps // 8)
        return (*super().settings[:2], every, self.steps)


_MOST_SECONDS = 1e10


def _to_seconds(value: Any, what: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return parse_duration(value, what)


@dataclass(frozen=True, kw_only=True)
class MinNorm(Eviction):
    """Evicts rows whose weights have an L2 norm below ``threshold``.

    They are swept like expired rows (`TTL`), every ``every`` steps, and by `HashTable.evict`. Under a bound,
    rows of the smallest norm are evicted first, and of equal norm the lower id. Choose initial rows of a norm
    above the threshold, or rows are evicted before they have trained.

    Args:
      threshold: >= 0.
      every: Steps between sweeps of a shard, >= 1. None: only `HashTable.evict` sweeps.
      max_rows: Bound on the rows; see `Eviction`.
      max_bytes: Bound on the memory; see `Eviction`.

    Example:
      >>> MinNorm(threshold=0.01, every=1000).kind
      'norm'
    """

    threshold: float
    every: int | None = None
    kind: ClassVar[str] = "norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.threshold < math.inf:
            raise ConfigError(f"MinNorm: threshold must lie in [0, inf), got {self.threshold}")
        if self.every is not None:
            check_whole(self, "every", self.every, 1, 2**32 - 1)

    @property
    def settings(self) -> tuple[float, ...]:
        """The parameters of the native op."""
        return (*super().settings[:2], self.every or 0, float(self.threshold))
