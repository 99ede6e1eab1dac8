"""What a user says of an embedding table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gmeta.core.errors import ConfigError
from gmeta.initializers.distributions import Initializer, Uniform
from gmeta.layers.embedding.keras_initializer import table_initializer
from gmeta.optimizers import SparseOptimizer
from gmeta.policies import Admission, Always, Eviction, TwoPrecisions


class RowPolicy(NamedTuple):
    """What the rows of a table are like. Tables of equal policy are merged."""

    dim: int
    initializer: Initializer
    admission: Admission
    eviction: Eviction | None
    precision: TwoPrecisions | None
    optimizer: SparseOptimizer | None


@dataclass(frozen=True)
class TableConfig:
    """An embedding table: how wide its rows are, how they begin, which ids have one, how they are trained.

    Attributes:
      name: The table's name.
      dim: Width of a row.
      initializer: Distribution of a row that is seen for the first time: one of `gmeta.initializers`; or a
        Keras initializer, or the name of one, that has an equal there.
      admission: Which ids get a row of their own when they are first seen; all of them by default.
      eviction: Which rows go, and when; none by default. A bound is that of the merged table, for all
        tables in it together.
      precision: `gmeta.policies.TwoPrecisions` keeps the rows of ids that are rarely seen in 16 bits, half
        the memory; None: all in float32. Each id's own frequency decides, whatever else is in the table.
      optimizer: One of `gmeta.optimizers`, for this table alone; None: the collection's.

    Raises:
      ConfigError: A width below 1, an initializer that tables don't have, or something else than an optimizer
        of `gmeta.optimizers`.

    Example:
      For a feature with many rare ids: an id gets a row when it is seen for the third time, that row takes
      half the memory until its tenth use, and those unused for longest go when all take a gigabyte:

      >>> from gmeta.policies import LRU, CountAdmission
      >>> devices = TableConfig(
      ...     "device",
      ...     dim=32,
      ...     admission=CountAdmission(3),
      ...     eviction=LRU(max_bytes=1 << 30),
      ...     precision=TwoPrecisions(threshold=10),
      ... )
      >>> devices.precision
      TwoPrecisions(threshold=10)
    """

    name: str
    dim: int
    initializer: Initializer = field(default_factory=lambda: Uniform(-0.05, 0.05))
    admission: Admission = field(default_factory=Always)
    eviction: Eviction | None = None
    precision: TwoPrecisions | None = None
    optimizer: SparseOptimizer | None = None

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        if not isinstance(self.name, str):
            raise ConfigError(f"a TableConfig's name must be text, got {self.name!r}")
        object.__setattr__(self, "initializer", table_initializer(self.initializer, where))
        if not isinstance(self.dim, int) or self.dim < 1:
            raise ConfigError(f"{where}: dim must be a whole number of at least 1, got {self.dim!r}")
        check_optimizer(self.optimizer, where)

    @property
    def policy(self) -> RowPolicy:
        """What its rows are like."""
        return RowPolicy(
            self.dim, self.initializer, self.admission, self.eviction, self.precision, self.optimizer
        )


def check_optimizer(optimizer: object, where: str) -> None:
    """Refuse what can't step rows.

    Raises:
      ConfigError: It is none of `gmeta.optimizers`.
    """
    if optimizer is not None and not isinstance(optimizer, SparseOptimizer):
        raise ConfigError(
            f"{where}: optimizer must be one of gmeta.optimizers (SGD, Momentum, Adagrad, RowWiseAdagrad, "
            f"Adam, AdamW, Ftrl), got {optimizer!r}; leave it out to follow the one that compile is given"
        )
