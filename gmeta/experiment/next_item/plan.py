"""The settings of an experiment on the next item, completed from the data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.schema import OnBad
from gmeta.core.settings import from_mapping
from gmeta.experiment.next_item.histories import PROTOCOLS, Cuts, Histories, Protocol, core, cut, read_events

Backbone = Literal["sasrec", "esasrec", "hstu", "fuxi"]
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

    def complete(self, train: Histories) -> NextItemMethod:
        """Decide what is left open from the training part."""
        longest = self.max_length
        if longest is None:
            longest = int(np.clip(np.ceil(np.quantile(train.sizes, 0.9) / 50) * 50, 50, 200))
        users = self.users_per_batch or int(np.clip(np.count_nonzero(train.sizes > 1) // 30, 32, 128))
        return replace(self, max_length=longest, users_per_batch=users)


def default_methods() -> dict[str, NextItemMethod]:
    """Return SASRec and HSTU."""
    return {"sasrec": NextItemMethod("SASRec"), "hstu": NextItemMethod("HSTU", "hstu")}


@dataclass(frozen=True)
class NextItemConfig:
    """An experiment on the next item with all settings decided.

    Attributes:
      item: The column of items.
      protocol: How histories are cut (`gmeta.experiment.next_item.histories`).
      core: The fewest events of a user, and of an item; users and items with fewer are left out, in turn,
        until none is left.
      seeds: Each method trains once per seed. The seed sets initial weights, initial rows and user order.
      ks: The numbers of items shown, for metrics; epochs are chosen by NDCG at the first.
      seen: Whether the table ranks items that the history has; None: if one in fifty events repeats an
        earlier item of its user. The report has both tables.
      blend: Whether to fit the blend of all models and baselines too.
      methods: Method name -> how it is trained.

    Example:
      A TOML file gives only what differs from these defaults::

        for = "next-item"
        protocol = "time"
        core = [5, 5]
        [methods.fuxi]
        label = "FuXi-α"
        model = "fuxi"
    """

    item: str
    protocol: Protocol = "leave-last-out"
    core: tuple[int, int] = (1, 1)
    seeds: tuple[int, ...] = (0,)
    ks: tuple[int, ...] = (10, 20)
    seen: bool | None = None
    blend: bool = True
    methods: Mapping[str, NextItemMethod] = field(default_factory=default_methods)

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {self.protocol!r}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds must be given, each once, got {list(self.seeds)}")
        if not self.ks or min(self.ks) < 1 or len(set(self.ks)) != len(self.ks):
            raise ConfigError(f"ks must be numbers of at least 1, each once, got {list(self.ks)}")
        if len(self.core) != 2 or min(self.core) < 1:
            raise ConfigError(
                f"core must be two numbers of at least 1, of a user's and of an item's events, got "
                f"{list(self.core)}"
            )
        if not self.methods and not self.blend:
            raise ConfigError("an experiment needs at least one method, or blend = true")


@dataclass(frozen=True)
class PlannedNextItem:
    """An experiment, and sentences that describe the decisions made for it."""

    config: NextItemConfig
    notes: tuple[str, ...] = ()


def read_cuts(config: NextItemConfig, data: Path, on_bad: OnBad = "raise") -> Cuts:
    """Read the data set of an experiment, and cut it.

    Raises:
      ConfigError: The protocol needs times that the data set lacks.
      DataError: The data set can't be read, or a part is empty.
    """
    events, ids = core(*read_events(data, config.item, on_bad), *config.core)
    return cut(events, ids, config.protocol)


def plan_next_item(given: Mapping[str, Any], data: Path, where: str = "config") -> PlannedNextItem:
    """Decide the settings that are left out.

    Args:
      given: Keys of `NextItemConfig` and values, without ``for``.
      data: A prepared data set whose tasks are users.
      where: The name of the settings in error messages.

    Raises:
      ConfigError: A key or a value is unknown, or no column looks like an item.
      DataError: The data set can't be read, or nothing is left of it.
    """
    from gmeta.experiment.plan.own_columns import likeliest_item, survey
    from gmeta.io.cuts.task_choice import TaskChoice

    manifest = Manifest.load(data)
    names = [column.name for column in manifest.schema]
    item = given.get("item")
    if item is None:
        ids = [
            column.name
            for column in manifest.schema
            if column.dtype == "int64" and not column.is_list and column.name not in _roles(manifest)
        ]
        found = survey(data / next(iter(manifest.splits)), manifest.schema, "", TaskChoice())
        item = likeliest_item(found, ids)
        if item is None:
            raise ConfigError(
                f"{data}: no column looks like an item's id, one that several tasks share; name it, --set "
                f"'item=\"COLUMN\"'; the columns are {', '.join(names)}"
            )
    column = next((each for each in manifest.schema if each.name == item), None)
    if column is None or column.is_list or column.dtype != "int64":
        what = "isn't there" if column is None else "holds lists or floats"
        raise ConfigError(
            f"{where}: item={item!r} {what}: name a column of ids; the columns are {', '.join(names)}"
        )
    config = from_mapping(NextItemConfig, {**given, "item": item}, where)
    events, ids_of_items = core(*read_events(data, item), *config.core)
    cuts = cut(events, ids_of_items, config.protocol)
    repeats = 1 - len(np.unique(events.owner * len(ids_of_items) + events.items)) / len(events.items)
    if config.seen is None:
        config = replace(config, seen=repeats > 0.02)
    methods = {name: method.complete(cuts.train) for name, method in config.methods.items()}
    notes = (
        f"predicts the next {item} of {manifest.schema.task}: {len(cuts.train):,} users, {cuts.items:,} "
        f"items, {len(cuts.train.items):,} events to train on",
        f"protocol {config.protocol}: {len(cuts.validation):,} users in validation, {len(cuts.test):,} in "
        "the test",
        f"{repeats:.1%} of events repeat an earlier item of their user: items seen are "
        f"{'ranked too' if config.seen else 'left out of the ranking'}",
    )
    return PlannedNextItem(replace(config, methods=methods), notes)


def _roles(manifest: Manifest) -> tuple[str | None, ...]:
    time = (manifest.config.get("table") or {}).get("time")
    return manifest.schema.task, manifest.schema.batch, time, "timestamp"
