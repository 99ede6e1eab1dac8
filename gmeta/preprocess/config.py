"""The settings of a preparation: everything that decides which bytes are written, beside the input itself."""

from __future__ import annotations

from dataclasses import dataclass

from gmeta.core.errors import ConfigError


@dataclass(frozen=True)
class PrepareConfig:
    """How raw ratings become a prepared data set.

    A task is a user. Tasks with ``min_ratings`` to ``max_ratings`` ratings, both included, are kept; those
    whose id is a multiple of ``cold_modulus`` form the split ``cold``, the others ``warm``. The split into
    support and query is the reader's business and isn't stored.

    Attributes:
      seed: Seeds everything that is random: the order of the batches, and the synthetic data set.
      cold_modulus: A task is cold if its id is divisible by this number; at least 2.
      min_ratings: Fewest ratings that a kept task has; at least 2, one each for support and query.
      max_ratings: Most ratings that a kept task has.
      batch_rows: Cut a task of ``n`` ratings into ``max(1, n // batch_rows)`` batches of consecutive ratings,
        even to within one, so that none has fewer than ``batch_rows`` unless the whole task has. At least
        ``min_ratings``. None makes each task one batch, as MAML on users wants it.
      shards: TFRecord files a split.

    Raises:
      ConfigError: A value is outside its range.
    """

    seed: int = 0
    cold_modulus: int = 5
    min_ratings: int = 13
    max_ratings: int = 100
    batch_rows: int | None = None
    shards: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed must be in 0..2^63-1, got {self.seed}")
        if self.cold_modulus < 2:
            raise ConfigError(f"cold_modulus must be at least 2, got {self.cold_modulus}")
        if not 2 <= self.min_ratings <= self.max_ratings:
            raise ConfigError(
                "2 <= min_ratings <= max_ratings is needed, "
                f"got min_ratings={self.min_ratings}, max_ratings={self.max_ratings}"
            )
        if self.batch_rows is not None and self.batch_rows < self.min_ratings:
            raise ConfigError(
                f"batch_rows must be at least min_ratings={self.min_ratings}, got {self.batch_rows}"
            )
        if not 1 <= self.shards <= 99_999:
            raise ConfigError(f"shards must be in 1..99999, got {self.shards}")
