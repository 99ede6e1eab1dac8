"""The settings of an experiment that ranks a catalogue: a data set, a protocol, several methods and seeds.

`NextItemConfig` is of the next item; `gmeta.experiment.plan.retrieval_config` has the settings of retrieval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from gmeta.core.errors import ConfigError
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.plan.generative_config import Backbone, GenerativeMethod, usual_length, usual_users

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
      heads: The heads of attention.
      max_length: How many of a history's last items are read; None: what nine in ten histories have, from 50
        to 200.
      dropout: The share of units that are dropped.
      learning_rate: Adam's rate, of rows too.
      users_per_batch: Users in a step; None: a thirtieth of all, from 32 to 128.
      negatives: Items drawn in a step; None: the default of `gmeta.models.NextItemModel`.
      epochs: The most passes over all users.
      patience: After how many epochs without a better one in validation training ends.
    """

    label: str
    model: Backbone = "sasrec"
    dim: int = 64
    blocks: int = 1
    heads: int = 1
    max_length: int | None = None
    dropout: float = 0.3
    learning_rate: float = 1e-3
    users_per_batch: int | None = None
    negatives: int | None = None
    epochs: int = 100
    patience: int = 10

    def __post_init__(self) -> None:
        counts = {
            name: getattr(self, name)
            for name in ("dim", "blocks", "heads", "max_length", "users_per_batch", "negatives", "epochs")
        }
        for name, value in (counts | {"patience": self.patience}).items():
            if value is not None and value < 1:
                raise ConfigError(f"method {self.label!r}: {name} must be at least 1, got {value}")
        if self.dim % self.heads:
            raise ConfigError(
                f"method {self.label!r}: dim={self.dim} must be a multiple of heads={self.heads}"
            )
        if not (self.learning_rate > 0 and 0 <= self.dropout < 1):
            raise ConfigError(
                f"method {self.label!r}: learning_rate must be above 0 and dropout in [0, 1), got "
                f"{self.learning_rate} and {self.dropout}"
            )

    def complete(self, sizes: Ints) -> NextItemMethod:
        """Decide what is left open from the numbers of the users' events in training, (users,)."""
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
      core: The fewest events of a user, and of an item; users and items with fewer are left out, in turn,
        until none is left.
      seeds: Each method trains once per seed. The seed sets initial weights, initial rows and user order.
      ks: The numbers of items shown, for metrics; epochs are chosen by NDCG at the first.
      seen: Whether the table ranks items that the history has. If users' items aren't sets, the report has
        both tables.
      blend: Whether to fit the blend of all models and baselines too.
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
        """Whether what is asked came after the history."""
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

    ``seen`` None: items seen are ranked if one in fifty events repeats an earlier item of its user.

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
