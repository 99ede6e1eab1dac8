"""Which ids a `gmeta.ops.HashTable` gives a row of their own, which rows go, and how precise they are.

They are settings, equal if their fields are; the decisions are native (``admission.h``, ``eviction.h`` and
``rows.h`` in ``ops/table``), and in plain Python in `gmeta.testing.reference`. All are deterministic:
the same batches in the same order give the same table, whatever the number of threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gmeta.core.errors import ConfigError

__all__ = [
    "LFU",
    "LRU",
    "TTL",
    "Admission",
    "Always",
    "Bloom",
    "CountAdmission",
    "Eviction",
    "MinNorm",
    "ProbabilityAdmission",
    "Tiers",
    "TwoPrecisions",
]

ROW_INDEX_BYTES = 48
"""What a bound in bytes charges a row beside its record, for its share of the key index."""


def _check_whole(owner: object, name: str, value: object, low: int, high: float = math.inf) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        limit = f"of at least {low}" if high == math.inf else f"from {low} to {high:.0f}"
        raise ConfigError(f"{type(owner).__name__}: {name} must be an integer {limit}, got {value!r}")


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
        _check_whole(self, "capacity", self.capacity, 1, 2**40)
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
      filter: None counts exactly, in 21 to 64 bytes an id that waits (an id that never comes again waits for
        ever); a row that is evicted later has to be counted anew. A `Bloom` filter bounds the memory at a
        stated error, and forgets nothing: a row that was evicted comes back at once.

    Example:
      >>> CountAdmission(3, filter=Bloom(capacity=10_000_000, error=0.01)).kind
      'filter'
    """

    threshold: int
    filter: Bloom | None = None

    def __post_init__(self) -> None:
        _check_whole(self, "threshold", self.threshold, 1, 255 if self.filter else 2**32 - 1)

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


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """Base of the eviction policies: which rows go, with their optimizer state.

    A bound is kept by inserting lookups, before a batch's own ids are looked at; so it may be exceeded by
    what one batch has inserted. To keep the work of a batch small and even, it is divided among the table's
    S shards (64; fewer if the bound is below 65,536 rows, so that a share is 1,024 rows at least), and shard
    i, when a batch meets it above its high mark, evicts down to its low mark, the rows of the lowest rank
    first and of equal rank the lower id::

    share = bound // S;  slack = share // 16;  high = share - slack * i // S;  low = high - slack

    So a full table holds between 87% and 100% of its bound, less what the hash distributes unevenly. With
    both bounds, a shard that is above either high mark goes down to both low marks. `HashTable.evict` does
    the same in all shards.

    Args:
      max_rows: Bound on the rows of the table; None: no such bound.
      max_bytes: Bound on the memory of the table; a row is charged its record (8 bytes + 4 for each weight
        and slot) and 48 bytes for the key index. None: no such bound.
    """

    max_rows: int | None = None
    max_bytes: int | None = None

    kind: ClassVar[str]
    """Its name in the native op."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_bytes"):
            if getattr(self, name) is not None:
                _check_whole(self, name, getattr(self, name), 1, 2**53)
        if self.kind in ("age", "frequency") and self.max_rows is None and self.max_bytes is None:
            raise ConfigError(
                f"{type(self).__name__}: give max_rows or max_bytes: with no bound nothing goes"
            )

    @property
    def settings(self) -> tuple[float, ...]:
        """What the native op is made with: bounds (0: none), steps between sweeps, the policy's own."""
        return (self.max_rows or 0, self.max_bytes or 0, 0)


@dataclass(frozen=True, kw_only=True)
class LRU(Eviction):
    """Least recently used rows go first: by last step, then by frequency, then by id.

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
    """Least frequently used rows go first: by frequency, then by last step, then by id.

    The frequency is the number of inserting lookups that have read the row since it was made; it does not
    age.

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
    """Time to live: rows that were last used more than ``steps`` steps ago expire.

    A row with ``last_step < step - steps`` goes at the next sweep of its shard, until which it is still
    there. Shard i of S is swept at the end of the ``apply_gradients`` that brings the step to
    ``(step + every * i // S) % every == 0``, so an update meets few sweeps; `HashTable.evict` sweeps all.
    Under a bound, rows go as in `LRU`.

    Args:
      steps: Steps without use that a row survives, >= 1.
      every: Steps between sweeps of a shard, >= 1. None: an eighth of ``steps``, at least 1.
      max_rows: Bound on the rows; see `Eviction`.
      max_bytes: Bound on the memory; see `Eviction`.

    Example:
      >>> TTL(steps=1000).settings
      (0, 0, 125, 1000)
    """

    steps: int
    every: int | None = None
    kind: ClassVar[str] = "expired"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_whole(self, "steps", self.steps, 1, 2**32 - 1)
        if self.every is not None:
            _check_whole(self, "every", self.every, 1, 2**32 - 1)

    @property
    def settings(self) -> tuple[float, ...]:
        """What the native op is made with."""
        every = self.every if self.every is not None else max(1, self.steps // 8)
        return (*super().settings[:2], every, self.steps)


@dataclass(frozen=True, kw_only=True)
class MinNorm(Eviction):
    """Rows whose weights have an L2 norm below ``threshold`` go.

    They are swept as expired rows are (`TTL`), every ``every`` steps, and by `HashTable.evict`. Under a
    bound, rows of the smallest norm go first, and of equal norm the lower id. Choose initial rows of a norm
    above the threshold, or rows will go before they have trained.

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
            _check_whole(self, "every", self.every, 1, 2**32 - 1)

    @property
    def settings(self) -> tuple[float, ...]:
        """What the native op is made with."""
        return (*super().settings[:2], self.every or 0, float(self.threshold))


@dataclass(frozen=True)
class TwoPrecisions:
    """Keeps rows that are rarely used in half precision (MTGenRec, appendix C).

    A row has its weights in float16 and its optimizer slots in bfloat16 while its frequency, the number of
    inserting lookups that have read it, is below ``threshold``. The lookup that brings it to ``threshold``
    promotes it to float32, for good. A half record has 8 bytes + 2 for each weight and slot, instead of 4.

    An update of a half row is computed in float32, and rounded to the nearest when it is stored: a weight w
    by at most ``max(2^-11 * |w|, 2^-25)``, a slot by at most 2^-8 of itself. Under `SGD`, which has no slots,
    a weight is after n updates by the same gradients within n + 1 such roundings of the float32 table's. A
    step below half a unit of w's last place is lost, which is why rows that train often should be in float32.
    Weights beyond ±65504 are stored as that. Initial rows are rounded too, and a missing id reads its row as
    it would be stored.

    Checkpoints hold float32, which is exact; restoring puts each row into the precision of its frequency.

    Args:
      threshold: Frequency from which a row is float32, >= 2.

    Example:
      >>> table = HashTable(64, precision=TwoPrecisions(threshold=10))
    """

    threshold: int

    def __post_init__(self) -> None:
        _check_whole(self, "threshold", self.threshold, 2, 2**32 - 1)


@dataclass(frozen=True)
class Tiers:
    """Keeps a bounded part of a table's rows in host memory, and the others in files on a drive.

    A row is in one place or the other, and a move between them means nothing: rows, optimizer slots,
    statistics, eviction and checkpoints are those of a table that is all in memory, bit for bit. A training
    lookup brings its rows to memory first, all reads of a batch at once. `gmeta.Pipeline` with ``depth=1``
    reads those of the next batch while a batch computes. Afterwards, rows that weren't used for long move to
    the drive: a clock passes a row over once if it was used since it last came by. Evaluation reads rows
    where they are.

    The drive gets appended segments of 256 KiB, and each row is written at most twice in the mean each time
    it moves there; the files take at most twice the bytes of the rows in them. They are scratch: they have no
    name, a process that ends or is killed leaves none, and a restart begins from a checkpoint. If the drive
    is full or fails, the call raises `tf.errors.ResourceExhaustedError` with the file, the offset and what
    to do.

    Args:
      host_bytes: Bytes of the rows in memory after each step; from its lookup to its update, the rows of its
        batch come on top. So do the key index, about 48 bytes for each row wherever it is, 8 to 16 bytes for
        each row on the drive, and the segments that fill, at most 32 MiB. A row has 8 bytes, and 4 for each
        weight and optimizer slot. The tables of a collection divide the bytes, so that each may have as many
        rows.
      ssd: A folder on a fast local drive. It is made if it isn't there.

    Raises:
      ConfigError: ``host_bytes`` isn't a positive integer; or when a table is made: the folder can't be made
        or written to, or the table is on a GPU.

    Example:
      >>> tiers = Tiers(host_bytes=8 << 30, ssd="/nvme/rows")
      >>> collection = EmbeddingCollection([FeatureConfig("item", dim=64)], tiers=tiers)  # doctest: +SKIP
    """

    host_bytes: int
    ssd: str

    def __post_init__(self) -> None:
        _check_whole(self, "host_bytes", self.host_bytes, 1)
        object.__setattr__(self, "ssd", os.fspath(self.ssd))

    def divide(self, row_bytes: Sequence[int]) -> list[Tiers]:
        """Divide the bytes among tables, by the bytes of their rows, so that each may have as many rows."""
        whole = sum(row_bytes)
        return [Tiers(max(1, self.host_bytes * one // whole), self.ssd) for one in row_bytes]

    def folder(self, owner: str) -> str:
        """Make the folder if need be, and return its absolute path; `owner` is for messages."""
        path = Path(self.ssd).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{owner}: the folder {path}, for rows on a drive, can't be made: {error.strerror}: name "
                "another one (Tiers.ssd)"
            ) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"{owner}: the folder {path} can't be written to: name another one (Tiers.ssd)")
        return str(path)
