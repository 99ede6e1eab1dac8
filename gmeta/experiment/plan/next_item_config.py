"""The settings of an experiment that ranks a catalogue: a data set, a protocol, several methods and seeds.

`NextItemConfig` is for the next item, and `RetrievalConfig` for retrieval: which items a user takes, in any
order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from gmeta.core.errors import ConfigError
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.plan.generative_config import (
    TIMED,
    Backbone,
    GenerativeMethod,
    usual_length,
    usual_users,
)

Protocol = Literal["leave-last-out", "time", "users", "random"]
PROTOCOLS: tuple[str, ...] = get_args(Protocol)
BLEND = "blend"
"""The method that weighs all models and baselines (`gmeta.experiment.next_item.blend`)."""


@dataclass(frozen=True)
class NextItemMethod:
    """A `gmeta.models.NextItemModel` and how it is trained.

    Attributes:
      label: Its name in tables and figures.
      model: The backbone.
      dim: The width of vectors.
      blocks: The number of blocks.
      heads: The number of attention heads.
      max_length: How many of a history's last items are read; None: a number, from 50 to 200, that nine in
        ten histories don't exceed.
      times: Whether the backbone reads times, which HSTU and FuXi-α can; None: if it can.
      horizon: For HSTU: the age, in the unit of the times, of events that a token sees well at the start of
        training; None: start as published.
      places: Whether positions are counted ``"from_end"`` or ``"from_start"`` of a history.
      token_scale: The factor of an item's vector before the backbone; None: the square root of ``dim``.
      norm: Whether the backbone's output gets a layer norm with weights.
      repeats: Whether to learn how likely items of the history are to repeat.
      dropout: The share of units that are dropped.
      initial_deviation: The standard deviation of new rows; None: Xavier's, the square root of 2 / (items +
        ``dim``).
      normalize: Whether scores are cosines, not products.
      temperature: The divisor of scores.
      negatives: Items drawn in a step, or for each user or position; None: the default of
        `gmeta.models.NextItemModel`.
      negatives_per: Which positions share negatives: all of a ``"step"``, those of a ``"user"``, or none:
        ``"position"``.
      in_batch: Whether the items that come next at the step's other positions are negatives too.
      log_q: Whether the loss corrects for how often items occur among in-batch negatives.
      learning_rate: Adam's rate, also for rows.
      warm_up: The number of steps in which the rate grows linearly to its full value; 0: no warm-up.
      beta_2: Adam's decay of squared gradients, also for rows.
      weight_decay: AdamW's decay of rows.
      users_per_batch: Users in a step; None: a thirtieth of all, from 32 to 128.
      epochs: The maximum number of passes over all users.
      patience: The number of epochs without an improvement in validation after which training ends.
    """

    label: str
    model: Backbone = "sasrec"
    dim: int = 64
    blocks: int = 1
    heads: int = 1
    max_length: int | None = None
    times: bool | None = None
    horizon: float | None = None
    places: Literal["from_end", "from_start"] = "from_end"
    token_scale: float | None = None
    norm: bool = True
    repeats: bool = True
    dropout: float = 0.3
    initial_deviation: float | None = None
    normalize: bool = False
    temperature: float = 1.0
    negatives: int | None = None
    negatives_per: Literal["step", "user", "position"] = "step"
    in_batch: bool = False
    log_q: bool = False
    learning_rate: float = 1e-3
    warm_up: int = 0
    beta_2: float = 0.98
    weight_decay: float = 0.004
    users_per_batch: int | None = None
    epochs: int = 100
    patience: int = 10

    def __post_init__(self) -> None:
        where = f"method {self.label!r}:"
        counts = ("dim", "blocks", "heads", "max_length", "negatives", "users_per_batch", "epochs")
        for name in (*counts, "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{where} {name} must be at least 1, got {value}")
        if self.dim % self.heads:
            raise ConfigError(f"{where} dim={self.dim} must be a multiple of heads={self.heads}")
        for name in ("horizon", "token_scale", "initial_deviation", "temperature", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{where} {name} must be a finite number above 0, got {value}")
        for name in ("dropout", "beta_2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{where} {name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("warm_up", "weight_decay"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(
                    f"{where} {name} must be a finite number of at least 0, got {getattr(self, name)}"
                )
        if self.times and self.model not in TIMED:
            raise ConfigError(
                f"{where} {self.model!r} reads no times: leave times out, or choose {' or '.join(TIMED)}"
            )
        if self.horizon is not None and not (self.model == "hstu" and self.reads_times):
            raise ConfigError(
                f"{where} horizon is of HSTU's bias by time, which this model doesn't have: leave it out"
            )
        if self.negatives_per != "step" and self.negatives is None:
            raise ConfigError(
                f"{where} negatives_per={self.negatives_per!r} draws them for each {self.negatives_per}: set "
                "negatives to a small number, such as 128"
            )
        if self.log_q and not self.in_batch:
            raise ConfigError(
                f"{where} log_q corrects for in-batch negatives, and there are none: set in_batch = true, or "
                "leave log_q out"
            )

    @property
    def reads_times(self) -> bool:
        """Whether the backbone reads times if the data set has them."""
        return self.model in TIMED if self.times is None else self.times

    def complete(self, sizes: Ints) -> NextItemMethod:
        """Decide the settings that are None from the numbers of the users' events in training, (users,)."""
        return replace(
            self,
            max_length=self.max_length or usual_length(sizes),
            users_per_batch=self.users_per_batch or usual_users(sizes),
        )


def default_methods() -> dict[str, NextItemMethod | GenerativeMethod]:
    """Return SASRec and HSTU."""
    return {"sasrec": NextItemMethod("SASRec"), "hstu": NextItemMethod("HSTU", "hstu")}


@dataclass(frozen=True)
class CatalogueConfig:
    """An experiment that ranks a catalogue of items, with all settings decided.

    Attributes:
      item: The column of items.
      protocol: How histories are cut (`gmeta.experiment.next_item.histories`).
      core: The minimum numbers of events of a user and of an item; users and items with fewer are removed
        repeatedly, until none have fewer.
      seeds: Each method trains once per seed. The seed sets initial weights, initial rows and user order.
      ks: The numbers of items shown, for metrics; epochs are chosen by NDCG at the first.
      seen: Whether the table ranks items of the history. If users' items aren't sets, the report has both
        tables.
      blend: Whether to also fit the blend of all models and baselines.
      methods: Method name -> how it is trained.
    """

    PROTOCOLS: ClassVar[tuple[str, ...]] = PROTOCOLS
    """The protocols of these experiments."""
    SETS: ClassVar[bool] = False
    """Whether a user's items are a set: each counts once."""

    @property
    def title(self) -> str:
        """What is asked, as a heading."""
        raise NotImplementedError

    @property
    def ordered(self) -> bool:
        """Whether the targets come after the history."""
        return self.protocol != "random"

    item: str
    protocol: Protocol = "leave-last-out"
    core: tuple[int, int] = (1, 1)
    seeds: tuple[int, ...] = (0,)
    ks: tuple[int, ...] = (10, 20)
    seen: bool | None = None
    blend: bool = True
    methods: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.protocol not in self.PROTOCOLS:
            raise ConfigError(f"protocol must be one of {', '.join(self.PROTOCOLS)}, got {self.protocol!r}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds must be given, each once, got {list(self.seeds)}")
        if not self.ks or min(self.ks) < 1 or len(set(self.ks)) != len(self.ks):
            raise ConfigError(f"ks must be numbers of at least 1, each once, got {list(self.ks)}")
        if len(self.core) != 2 or min(self.core) < 1:
            raise ConfigError(
                f"core must be two numbers of at least 1, of a user's and of an item's events, got "
                f"{list(self.core)}"
            )
        if BLEND in self.methods:
            raise ConfigError(f"a method can't be called {BLEND!r}: this is the blend of all of them")
        if not self.methods and not self.blend:
            raise ConfigError("an experiment needs at least one method, or blend = true")


@dataclass(frozen=True)
class NextItemConfig(CatalogueConfig):
    """An experiment on the next item with all settings decided.

    With ``seen=None``, seen items are ranked if one in fifty events repeats an earlier item of its user.

    Example:
      A TOML file gives only what differs from these defaults::

        for = "next-item"
        protocol = "time"
        core = [5, 5]
        [methods.fuxi]
        label = "FuXi-α"
        model = "fuxi"
    """

    PROTOCOLS: ClassVar[tuple[str, ...]] = tuple(each for each in PROTOCOLS if each != "random")

    methods: Mapping[str, NextItemMethod | GenerativeMethod] = field(default_factory=default_methods)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, method in self.methods.items():
            if isinstance(method, GenerativeMethod) and method.beam < max(self.ks):
                raise ConfigError(
                    f"methods.{name}: beam must be at least {max(self.ks)}, the most items that ks shows, "
                    f"got {method.beam}"
                )

    @property
    def title(self) -> str:
        """What is asked, as a heading."""
        return f"The next {self.item}"


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


def default_towers() -> dict[str, TwoTowerMethod]:
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
    methods: Mapping[str, TwoTowerMethod] = field(default_factory=default_towers)

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
