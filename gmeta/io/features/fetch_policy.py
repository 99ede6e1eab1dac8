"""How features are fetched, the same for every store, and what was counted meanwhile."""

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
      attempts: How often a request is made at most, when the connection fails or time runs out. A request
        that the store refuses isn't repeated.
      backoff: Seconds before the second attempt; twice as long before each further one, less up to a half by
        chance, so that ranks don't come back all at once.
      cache_rows: The most rows that are kept, of each set of columns; the least recently used go first. That
        a key has no value is kept too. 0 keeps none.
      cache_seconds: How long a row stands for the newest one where no ``as_of`` is given. Rows of an
        ``as_of`` are kept for as long as there is room: what is written later about the past isn't seen.
      resolution: ``as_of`` is rounded down to a multiple of this. A row is then at most that much older than
        it could be, never newer, and rows of one multiple share a request and a place in the cache.
      missing: What becomes of a value that isn't there. ``"raise"``: `DataError` names it. ``"null"``: it is
        null. ``"default"``: it is `defaults`' one.
      defaults: Column -> a number, or for a list column a sequence of them. Columns that it lacks have 0, or
        an empty list.

    Raises:
      ConfigError: A number that makes no sense, or an unknown rule.
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
    """What a `FeatureSource` has done since it was made.

    Attributes:
      rows: Keys asked for, repeated ones too.
      distinct: What was left of them after equal ones of a call (and of an ``as_of``) were joined.
      hits: Of these, the ones that the cache had.
      misses: The ones that it hadn't, and that were fetched.
      requests: Requests made to the store, repeated ones too.
      retries: Of these, the repeated ones.
      timeouts: Of these, the ones that took too long.
      missing_keys: Distinct keys of a call that had none of the asked values.
      missing_values: Values that weren't there, those of the missing keys too.
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
