"""What a user says of a categorical feature."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gmeta.core.errors import ConfigError
from gmeta.ops.initializers import Initializer, Uniform

Pooling = Literal["sum", "mean", "sqrtn"]


@dataclass(frozen=True)
class FeatureConfig:
    """A categorical feature and how its ids become a vector.

    Attributes:
      name: The feature's name in the input.
      dim: Width of its embedding.
      pooling: How the rows of a ragged feature become one vector: their ``"sum"``, their ``"mean"``, or
        the sum over the square root of their number (``"sqrtn"``). None for a feature of one id a sample.
        A sample without ids has the zero vector.
      table: Name of the embedding table. Features that name the same table share its rows; None gives the
        feature a table of its own.
      initializer: Distribution of a row that is seen for the first time.

    Raises:
      ConfigError: A width below 1 or an unknown pooling.

    Example:
      >>> FeatureConfig("genre", dim=32, pooling="mean").table_name
      'genre'
    """

    name: str
    dim: int
    pooling: Pooling | None = None
    table: str | None = None
    initializer: Initializer = field(default_factory=lambda: Uniform(-0.05, 0.05))

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"feature {self.name!r}: dim must be at least 1, got {self.dim}")
        if self.pooling not in (None, "sum", "mean", "sqrtn"):
            raise ConfigError(
                f"feature {self.name!r}: pooling must be None, 'sum', 'mean' or 'sqrtn', got {self.pooling!r}"
            )

    @property
    def table_name(self) -> str:
        """The table that the feature reads."""
        return self.table or self.name
