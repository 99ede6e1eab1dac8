"""The settings of an experiment on retrieval: which items a user takes, in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from gmeta.core.errors import ConfigError
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.plan.next_item_config import CatalogueConfig, Protocol

ChosenColumns = bool | tuple[str, ...]
"""All columns of users and of items, none, or these."""


@dataclass(frozen=True)
class TwoTowerMethod:
    """A `gmeta.models.TwoTower` and how it is trained.

    Attributes:
      label: Its name in tables and figures.
      model: The kind of model.
      user_id: Whether the user tower reads the user's id.
      history: Whether the user tower reads the user's other items.
      columns: Whether the towers read the columns of users and of items, such as an age or genres
        (`gmeta.experiment.next_item.side_columns`), or the names of the columns that they read.
      dim: The width of vectors.
      normalize: Whether scores are cosines, not products.
      temperature: The divisor of scores.
      hidden: The widths of each tower's hidden layers.
      item_dropout: The share of a history that the user tower doesn't read in training.
      dropout: The share of the user vector's numbers that are dropped in training.
      learning_rate: Adam's rate, also for rows.
      weight_decay: AdamW's decay of rows.
      users_per_batch: Users in a step; None: a thirtieth of all, from 32 to 128.
      negatives: Items drawn in a step; None: the default of `gmeta.models.TwoTower`.
      law: The law of negatives: ``"in-batch"``, ``"uniform"`` or ``"popularity"``.
      epochs: The maximum number of passes over all users.
      patience: The number of epochs without an improvement in validation after which training ends.
    """

    label: str
    model: Literal["two-tower"] = "two-tower"
    user_id: bool = True
    history: bool = True
    columns: ChosenColumns = True
    dim: int = 64
    normalize: bool = True
    temperature: float = 0.2
    hidden: tuple[int, ...] = ()
    item_dropout: float = 0.5
    dropout: float = 0.3
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    users_per_batch: int | None = None
    negatives: int | None = None
    law: Literal["in-batch", "uniform", "popularity"] = "uniform"
    epochs: int = 200
    patience: int = 10

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("dim", "users_per_batch", "negatives", "epochs")}
        for name, value in (counts | {"patience": self.patience}).items():
            if value is not None and value < 1:
                raise ConfigError(f"method {self.label!r}: {name} must be at least 1, got {value}")
        if self.temperature <= 0:
            raise ConfigError(f"method {self.label!r}: temperature must be above 0, got {self.temperature}")
        if not (self.learning_rate > 0 and self.weight_decay >= 0):
            raise ConfigError(
                f"method {self.label!r}: learning_rate must be above 0 and weight_decay from 0 on, got "
                f"{self.learning_rate} and {self.weight_decay}"
            )
        if not (0 <= self.item_dropout < 1 and 0 <= self.dropout < 1):
            raise ConfigError(
                f"method {self.label!r}: item_dropout and dropout must be at least 0 and below 1, got "
                f"{self.item_dropout} and {self.dropout}"
            )
        if self.negatives is not None and self.law == "in-batch":
            raise ConfigError(
                f"method {self.label!r}: the law 'in-batch' draws no items: leave negatives out"
            )
        if not (self.user_id or self.history or self.columns):
            raise ConfigError(
                f"method {self.label!r}: the user tower needs the user's id, history or columns: set one to "
                "true"
            )

    def complete(self, sizes: Ints) -> TwoTowerMethod:
        """Decide the settings that are None from the numbers of the users' items in training, (users,)."""
        users = self.users_per_batch or int(np.clip(np.count_nonzero(sizes > 1) // 30, 32, 128))
        return replace(self, users_per_batch=users)


def default_methods() -> dict[str, TwoTowerMethod]:
    """Return a two-tower model."""
    return {"two_tower": TwoTowerMethod("two-tower")}


@dataclass(frozen=True)
class RetrievalConfig(CatalogueConfig):
    """An experiment on retrieval with all settings decided.

    A user's items are a set: only the first of several events with the same item counts.

    Example:
      A TOML file gives only what differs from these defaults::

        for = "retrieval"
        protocol = "time"
        [methods.two_tower]
        label = "two-tower"
        law = "in-batch"
    """

    SETS: ClassVar[bool] = True

    protocol: Protocol = "random"
    seen: bool | None = False
    methods: Mapping[str, TwoTowerMethod] = field(default_factory=default_methods)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seen:
            raise ConfigError(
                "seen: in retrieval, an item counts once for each user, and nothing that the user has is "
                "asked for: leave it out"
            )

    @property
    def title(self) -> str:
        """What is asked, as a heading."""
        return f"Retrieval of {self.item}"
