"""What a user says of a categorical feature."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gmeta.core.errors import ConfigError
from gmeta.initializers.distributions import Initializer, Uniform
from gmeta.layers.embedding.keras_initializer import table_initializer
from gmeta.policies import Admission, Always, Eviction, TwoPrecisions

Pooling = Literal["sum", "mean", "sqrtn"]


class RowPolicy(NamedTuple):
    """What the rows of a table are like. Tables of equal policy are merged."""

    dim: int
    initializer: Initializer
    admission: Admission
    eviction: Eviction | None
    precision: TwoPrecisions | None


@dataclass(frozen=True)
class FeatureConfig:
    """A categorical feature and how its ids become vectors.

    Attributes:
      name: The feature's name in the input.
      dim: Width of its embedding.
      pooling: How the rows of a sample's ids become one vector: their ``"sum"``, their ``"mean"``, or the
        sum over the square root of their number (``"sqrtn"``); a sample without ids has the zero vector.
        None: a vector for each id. See `gmeta.layers.EmbeddingCollection` for the shapes.
      table: Name of the embedding table. Features that name the same table share its rows; None gives the
        feature a table of its own.
      initializer: Distribution of a row that is seen for the first time: one of `gmeta.initializers`; or a
        Keras initializer, or the name of one, that has an equal there.
      admission: Which ids get a row of their own when they are first seen; all of them by default.
      eviction: Which rows go, and when; none by default. A bound is that of the merged table, for all its
        features together.
      precision: `gmeta.policies.TwoPrecisions` keeps the rows of ids that are rarely seen in 16 bits, half
        the memory; None: all in float32. Each id's own frequency decides, whatever else is in the table.
      max_length: Of a sample's ids only the last this many are used (the latest, where they stand in the
        order of time); None uses all.
      hash: Take strings, and any 64-bit numbers, as ids: `gmeta.ops.hash_ids` with the bits that the table
        leaves (`gmeta.layers.EmbeddingCollection.plan` shows them). A text, and the number that ``gmeta
        prepare`` has stored of it, read the same row, in exported models too. Whole numbers that fit read
        the row that they read without ``hash``.

    Raises:
      ConfigError: A width or length below 1, an unknown pooling, an initializer that tables don't have, or a
        ``hash`` that isn't True or False.

    Example:
      >>> FeatureConfig("genre", dim=32, pooling="mean").table_name
      'genre'

      For a feature with many rare ids: an id gets a row when it is seen for the third time, that row takes
      half the memory until its tenth use, and those unused for longest go when all take a gigabyte:

      >>> device = FeatureConfig(
      ...     "device",
      ...     dim=32,
      ...     admission=CountAdmission(3),
      ...     eviction=LRU(max_bytes=1 << 30),
      ...     precision=TwoPrecisions(threshold=10),
      ... )
      >>> device.policy.precision
      TwoPrecisions(threshold=10)
    """

    name: str
    dim: int
    pooling: Pooling | None = None
    table: str | None = None
    initializer: Initializer = field(default_factory=lambda: Uniform(-0.05, 0.05))
    admission: Admission = field(default_factory=Always)
    eviction: Eviction | None = None
    precision: TwoPrecisions | None = None
    max_length: int | None = None
    hash: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "initializer", table_initializer(self.initializer, f"feature {self.name!r}"))
        if not isinstance(self.hash, bool):
            raise ConfigError(f"feature {self.name!r}: hash must be True or False, got {self.hash!r}")
        if self.dim < 1:
            raise ConfigError(f"feature {self.name!r}: dim must be at least 1, got {self.dim}")
        if self.pooling not in (None, "sum", "mean", "sqrtn"):
            raise ConfigError(
                f"feature {self.name!r}: pooling must be None, 'sum', 'mean' or 'sqrtn', got {self.pooling!r}"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(
                f"feature {self.name!r}: max_length must be at least 1, or None, got {self.max_length}"
            )

    @property
    def table_name(self) -> str:
        """The table that the feature reads."""
        return self.table or self.name

    @property
    def policy(self) -> RowPolicy:
        """What it asks of its table."""
        return RowPolicy(self.dim, self.initializer, self.admission, self.eviction, self.precision)
