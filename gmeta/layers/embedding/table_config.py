"""The user's settings for an embedding table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros
from gmeta.optimizers import SparseOptimizer
from gmeta.policies import TwoPrecisions
from gmeta.policies.row_lifetimes import Admission, Always, Eviction

# Converts Keras' initializers to gmeta's, for those that have an equal one there.

_EQUALS: dict[str, Callable[[Mapping[str, Any]], Initializer]] = {
    "Zeros": lambda config: Zeros(),
    "Ones": lambda config: Constant(1.0),
    "Constant": lambda config: Constant(float(config["value"])),
    "RandomUniform": lambda config: Uniform(float(config["minval"]), float(config["maxval"])),
    "RandomNormal": lambda config: Normal(float(config["mean"]), float(config["stddev"])),
    "TruncatedNormal": lambda config: TruncatedNormal(float(config["mean"]), float(config["stddev"])),
}


def table_initializer(given: Any, owner: str) -> Initializer:
    """Convert the row initializer that a user gave to one of gmeta's.

    Args:
      given: One of `gmeta.initializers`, one of ``tf.keras.initializers``, or the name of one of these.
      owner: The feature or table that it belongs to, for messages.

    Raises:
      ConfigError: gmeta has no equal initializer, or the given one has a seed of its own.

    Example:
      >>> table_initializer("uniform", "feature 'user'")
      Uniform(low=-0.05, high=0.05)
    """
    if isinstance(given, Initializer):
        return given
    ours = "give one of gmeta.initializers: Uniform, Normal, TruncatedNormal, Constant or Zeros"
    try:
        found = tf.keras.initializers.get(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    make = _EQUALS.get(type(found).__name__) if isinstance(found, tf.keras.initializers.Initializer) else None
    if make is None:
        raise ConfigError(f"{owner}: rows can't start from initializer={given!r}: {ours}")
    config = found.get_config()
    if config.get("seed") is not None:
        raise ConfigError(
            f"{owner}: the seed of initializer={type(found).__name__}(seed={config['seed']}) isn't a row's: "
            "leave it out, and give EmbeddingCollection(seed=...)"
        )
    try:
        return make(config)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{owner}: initializer={type(found).__name__}({config}) isn't of single numbers: {ours}"
        ) from error


MAX_DIM = 1 << 20
"""The most numbers of a row."""


class RowPolicy(NamedTuple):
    """The policy of a table's rows. Tables of equal policy are merged."""

    dim: int
    initializer: Initializer
    admission: Admission
    eviction: Eviction | None
    precision: TwoPrecisions | None
    optimizer: SparseOptimizer | None


@dataclass(frozen=True)
class TableConfig:
    """An embedding table: the width of its rows, their initial values, which ids get one, how they train.

    Attributes:
      name: The table's name.
      dim: Width of a row, at most 1,048,576.
      initializer: Distribution of a new row's values: one of `gmeta.initializers`, or a Keras initializer,
        or its name, that has an equal in `gmeta.initializers`.
      admission: Which ids get a row of their own when they are first seen; all of them by default.
      eviction: Which rows to remove, and when; none by default. A bound applies to the merged table, that
        is, to all tables in it together.
      precision: `gmeta.policies.TwoPrecisions` keeps the rows of rarely seen ids in 16 bits, half the
        memory. None: all rows are float32. Each id's own frequency decides, whatever else is in the table.
      optimizer: One of `gmeta.optimizers`, for this table only. None: the collection's.

    Raises:
      ConfigError: The width is below 1, tables don't support the initializer, or the optimizer isn't one
        of `gmeta.optimizers`.

    Example:
      A feature with many rare ids. An id gets a row when it is seen for the third time. That row takes half
      the memory until its tenth use, and again when it hasn't been used for long. When all rows take a
      gigabyte, those unused for longest are removed:

      >>> from gmeta.policies import LRU, CountAdmission
      >>> devices = TableConfig(
      ...     "device",
      ...     dim=32,
      ...     admission=CountAdmission(3),
      ...     eviction=LRU(max_bytes=1 << 30),
      ...     precision=TwoPrecisions(threshold=10, half_life=100_000),
      ... )
      >>> devices.precision
      TwoPrecisions(threshold=10, half_life=100000, rounding='stochastic')
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
        if not isinstance(self.dim, int) or not 1 <= self.dim <= MAX_DIM:
            raise ConfigError(f"{where}: dim must be a whole number from 1 to {MAX_DIM}, got {self.dim!r}")
        check_optimizer(self.optimizer, where)

    @property
    def policy(self) -> RowPolicy:
        """The policy of the table's rows."""
        return RowPolicy(
            self.dim, self.initializer, self.admission, self.eviction, self.precision, self.optimizer
        )


def check_optimizer(optimizer: object, where: str) -> None:
    """Refuse anything but None and the optimizers that can update rows.

    Raises:
      ConfigError: ``optimizer`` isn't one of `gmeta.optimizers`.
    """
    if optimizer is not None and not isinstance(optimizer, SparseOptimizer):
        raise ConfigError(
            f"{where}: optimizer must be one of gmeta.optimizers (SGD, Momentum, Adagrad, RowWiseAdagrad, "
            f"Adam, AdamW, Ftrl), got {optimizer!r}; leave it out to follow the one that compile is given"
        )
