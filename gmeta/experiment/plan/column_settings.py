"""An experiment's settings of a column: how ids are embedded, and how numbers are scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.feature_config import Combiner

MAX_WIDTH = 1 << 16
"""The most units of a layer, and numbers of an embedding."""


@dataclass(frozen=True)
class FeatureSettings:
    """The settings of a column of ids.

    Attributes:
      dim: Width of its embedding; None: the experiment's ``embedding_dim``.
      hash: Whether its ids are hashed: clients of an exported model then send text, and ids may be any
        numbers. None: as `gmeta prepare` has stored the column.
      combiner: How a row's several ids become one vector; None: their mean, if the column holds lists.
      table: The embedding table, if the column shares it with another column; None: a table of its own.
      max_length: How many of a row's ids are used, counted from the last; None: all.
    """

    FORMER_NAMES: ClassVar[dict[str, str]] = {"pooling": "combiner"}

    dim: int | None = None
    hash: bool | None = None
    combiner: Combiner | None = None
    table: str | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.dim is not None and not 1 <= self.dim <= MAX_WIDTH:
            raise ConfigError(f"dim must lie in [1, {MAX_WIDTH}], got {self.dim}")
        if self.max_length is not None and not 1 <= self.max_length < 2**31:
            raise ConfigError(f"max_length must lie in [1, {2**31 - 1}], got {self.max_length}")


@dataclass(frozen=True)
class NumberScale:
    """The scale of a column of numbers: the network takes ``(x - mean) / deviation``.

    Attributes:
      mean: The mean over the training rows.
      deviation: Their standard deviation, above 0.
    """

    mean: float
    deviation: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.deviation) and self.deviation > 0):
            raise ConfigError(
                f"mean must be a number and deviation one above 0, got {self.mean} and {self.deviation}"
            )
