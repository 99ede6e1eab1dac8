"""What a user says of a categorical feature."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.table_config import TableConfig

Combiner = Literal["sum", "mean", "sqrtn"]


@dataclass(frozen=True)
class FeatureConfig:
    """A categorical feature, and how its ids become vectors.

    Attributes:
      name: The feature's name in the input.
      table: The embedding table that it reads. Features that name the same table share its rows. None gives
        the feature a table of its own name, ``dim`` wide.
      combiner: How the rows of a sample's ids become one vector: their ``"sum"``, their ``"mean"``, or the
        sum over the square root of their number (``"sqrtn"``); a sample without ids has the zero vector.
        None: a vector for each id. See `gmeta.layers.EmbeddingCollection` for the shapes.
      max_length: Of a sample's ids only the last this many are used (the latest, where they stand in the
        order of time); None uses all.
      hash: Take strings, and any 64-bit numbers, as ids: `gmeta.ops.hash_ids` with the bits that the table
        leaves (`gmeta.layers.EmbeddingCollection.plan` shows them). A text, and the number that ``gmeta
        prepare`` has stored of it, read the same row, in exported models too. Whole numbers that fit read
        the row that they read without ``hash``.
      dim: Width of its vectors, in place of a table.

    Raises:
      ConfigError: Neither a table nor a ``dim``, or two that differ; a length below 1, an unknown combiner,
        or a ``hash`` that isn't True or False.

    Example:
      >>> genres = FeatureConfig("genre", dim=32, combiner="mean")
      >>> genres.table.name
      'genre'

      Two features of one table:

      >>> items = TableConfig("items", dim=32)
      >>> features = [FeatureConfig("clicked", items, combiner="sum"), FeatureConfig("shown", items)]
      >>> features[1].dim
      32
    """

    name: str
    table: TableConfig = field(default=None)  # type: ignore[assignment]  # __post_init__ makes one
    combiner: Combiner | None = None
    max_length: int | None = None
    hash: bool = False
    dim: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        where = f"feature {self.name!r}"
        if self.table is None:
            if not self.dim:
                raise ConfigError(f"{where}: give it a table=TableConfig(...), or dim= for one of its own")
            object.__setattr__(self, "table", TableConfig(self.name, self.dim))
        if not isinstance(self.table, TableConfig):
            raise ConfigError(
                f"{where}: table must be a gmeta.layers.TableConfig, got {self.table!r}; "
                f"FeatureConfig({self.name!r}, dim=16) has a table of its own"
            )
        if self.dim not in (0, self.table.dim):
            raise ConfigError(
                f"{where}: dim={self.dim}, but its table {self.table.name!r} is {self.table.dim} wide: leave "
                "dim out"
            )
        object.__setattr__(self, "dim", self.table.dim)
        if not isinstance(self.hash, bool):
            raise ConfigError(f"{where}: hash must be True or False, got {self.hash!r}")
        if self.combiner not in (None, "sum", "mean", "sqrtn"):
            raise ConfigError(
                f"{where}: combiner must be None, 'sum', 'mean' or 'sqrtn', got {self.combiner!r}"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"{where}: max_length must be at least 1, or None, got {self.max_length}")
