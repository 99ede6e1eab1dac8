"""What an experiment says of a column: how ids are embedded, and how numbers are brought to one scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.feature_config import Combiner


@dataclass(frozen=True)
class FeatureSettings:
    """A column of ids.

    Attributes:
      dim: Width of its embedding; None: the experiment's ``embedding_dim``.
      hash: Whether its ids are hashed: clients of an exported model then send text, and ids may be any
        numbers. None: as `gmeta prepare` has stored the column.
      combiner: How a row's several ids become one vector; None: their mean, where the column holds lists.
      table: The embedding table, where it shares the rows of another column; None: one of its own.
      max_length: Of a row's ids only the last so many are used; None: all.
    """

    FORMER_NAMES: ClassVar = {"pooling": "combiner"}

    dim: int | None = None
    hash: bool | None = None
    combiner: Combiner | None = None
    table: str | None = None
    max_length: int | None = None


@dataclass(frozen=True)
class NumberScale:
    """The scale that a column of numbers has: the network takes ``(x - mean) / deviation``.

    Attributes:
      mean: Over the rows that are trained on.
      deviation: Their standard deviation, above 0.
    """

    mean: float
    deviation: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.deviation) and self.deviation > 0):
            raise ConfigError(
                f"mean must be a number and deviation one above 0, got {self.mean} and {self.deviation}"
            )
