"""The policy by which features are fetched, the same for every store, and the counters of fetching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gmeta.core.errors import ConfigError

Number = int | float
Missing = Literal["raise", "null", "default"]
MISSING: tuple[Missing, ...] = ("raise", "null", "default")


@dataclass(frozen=True)
class FetchPolicy:
    """How a `FeatureSource` fetches rows.

    Attributes:
      batch_rows: The most rows of one request to the store.
      timeout: Seconds that a request may take; None sets no limit, and saves a thread for each request.
      attempts: The most attempts at a request whose connection fails or whose time runs out. A request that
        the store refuses isn't repeated.
      backoff: Seconds before the second attempt; the wait doubles before each further attempt. Each wait is
        shortened at random, by up to a half, so that ranks don't retry all at once.
      cache_rows: The most rows that are cached, for each set of columns; the least recently used are dropped
        first. The cache also remembers that a key has no value. 0 caches none.
      cache_seconds: How long a cached row counts as the newest one if no ``as_of`` is given. Rows of an
        ``as_of`` are cached as long as there is room, so later writes about the past aren't seen.
      resolution: ``as_of`` is rounded down to a multiple of this. A row is then at most that much older than
        necessary, never newer, and rows of one multiple share a request and an entry in the cache.
      missing: How a missing value is treated. ``"raise"``: a `DataError` names it. ``"null"``: it is null.
        ``"default"``: it is the column's value in `defaults`.
      defaults: Column -> a number, or for a list column a sequence of numbers. Other columns have 0, or an
        empty list.

    Raises:
      ConfigError: A number is out of range, or the rule is unknown.
    """

    batch_rows: int = 1024
    timeout: float | None = 5.0
    attempts: int = 3
    backoff: float = 0.1
    cache_rows: int = 100_000
    cache_seconds: float = 60.0
    resolution: int = 1
    missing: Missing = "raise"
    defaults: Mapping[str, Number | Sequence[Number]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"batch_rows": 1, "attempts": 1, "backoff": 0, "cache_rows": 0, "resolution": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"FetchPolicy: {name}={getattr(self, name)} must be at least {low}")
        if not self.cache_seconds > 0 or (self.timeout is not None and not self.timeout > 0):
            raise ConfigError(
                f"FetchPolicy: timeout={self.timeout} and cache_seconds={self.cache_seconds} must be above 0 "
                "(timeout=None sets no limit)"
            )
        if self.missing not in MISSING:
            raise ConfigError(
                f"FetchPolicy: missing must be 'raise', 'null' or 'default', got {self.missing!r}"
            )


@dataclass(frozen=True)
class FetchCounts:
    """The counters of a `FeatureSource` since it was made.

    Attributes:
      rows: Requested keys, including repeated ones.
      distinct: Requested keys after joining equal keys of a call (and of an ``as_of``).
      hits: Distinct keys found in the cache.
      misses: Distinct keys not found in the cache, which were fetched.
      requests: Requests made to the store, including repeated ones.
      retries: Repeated requests.
      timeouts: Requests that took too long.
      missing_keys: Distinct keys of a call that had none of the requested values.
      missing_values: Missing values, including those of the missing keys.
    """

    rows: int = 0
    distinct: int = 0
    hits: int = 0
    misses: int = 0
    requests: int = 0
    retries: int = 0
    timeouts: int = 0
    missing_keys: int = 0
    missing_values: int = 0
