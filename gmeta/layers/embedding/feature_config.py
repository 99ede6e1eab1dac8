"""The user's settings for a categorical feature."""

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
      table: The embedding table that it reads. Features that name the same table share its rows. None: the
        feature gets its own table, with the feature's name and width ``dim``.
      combiner: How the rows of a sample's ids become one vector: their ``"sum"``, their ``"mean"``, or their
        sum divided by the square root of their number (``"sqrtn"``). A sample without ids has the zero
        vector. None: a vector for each id. See `gmeta.layers.EmbeddingCollection` for the shapes.
      max_length: Use only the last ``max_length`` ids of a sample (the latest, if ids are in order of time).
        None: use all.
      hash: Accept strings and any 64-bit numbers as ids. `gmeta.ops.hash_ids` hashes them to the bits that
        the table leaves (`gmeta.layers.EmbeddingCollection.plan` shows how many). A text reads the same row
        as the number that ``gmeta prepare`` stores for it, in exported models too. Whole numbers that fit
        read the same row with and without ``hash``.
      dim: Width of the feature's vectors; give it instead of a table.

    Raises:
      ConfigError: The feature has neither a table nor a ``dim``, or their widths differ; ``max_length`` is
        below 1; the combiner is unknown; or ``hash`` isn't True or False.

    Example:
      >>> genres = FeatureConfig("genre", dim=32, combiner="mean")
      >>> genres.table.name
      'genre'

      Two features that share a table:

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
