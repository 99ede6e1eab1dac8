"""The settings of an experiment on rows: a data set, a protocol, several methods and seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from gmeta.core.errors import ConfigError
from gmeta.experiment.plan.experiment_config import DrawnNegatives, budget_seconds
from gmeta.experiment.plan.next_item_config import BLEND

Protocol = Literal["random", "time", "tasks"]
PROTOCOLS: tuple[str, ...] = get_args(Protocol)
GRM = "grm"
Network = Literal["dcn", "dlrm", "fm", "grm"]
NETWORKS: tuple[str, ...] = get_args(Network)
Backbone = Literal["hstu", "fuxi"]
BACKBONES: tuple[str, ...] = get_args(Backbone)


@dataclass(frozen=True)
class RankingMethod:
    """A network on embeddings of ids and on numbers, and how it is trained.

    Attributes:
      label: Its name in tables and figures.
      model: ``"dcn"`` (`gmeta.models.DCN`'s network), ``"dlrm"`` (that of `gmeta.models.dlrm`), ``"fm"``, a
        factorisation machine, or ``"grm"``, which reads the earlier rows of a row's user as a sequence
        (`gmeta.experiment.ranking.networks`). Each also has a weight for each id, as in linear models.
      dim: The width of ids' vectors.
      hidden: The units of the perceptron's layers; for GRM, those of the experts' layer, then those of the
        tower's.
      cross: For DCN, the number of cross layers.
      rank: For DCN, the rank of their matrices; None: full.
      backbone: For GRM, ``"hstu"`` or ``"fuxi"``, FuXi-α.
      width: For GRM, the width of a token.
      blocks: For GRM, the number of the backbone's blocks.
      heads: For GRM, the number of a block's heads.
      experts: For GRM, the number of experts.
      longest: For GRM, how many earlier rows a row sees in a block.
      dropout: The share that is dropped: of vectors (DLRM), of units (DCN), of tokens' numbers and in the
        backbone (GRM).
      unknown: The share of ids that training treats as unknown, whose vectors are zero.
      bias_variance: The prior variance of an id's weight (`gmeta.optimizers.RowPrior`).
      variance: The prior variance of the components of an id's vector.
      learning_rate: Adam's rate, also for rows.
      rows_per_batch: Rows in a step; None: an eightieth of all, from 256 to 8,192.
      epochs: The maximum number of passes over all rows.
      patience: The number of epochs without an improvement in validation after which training ends.
    """

    label: str
    model: Network = "dcn"
    dim: int = 8
    hidden: tuple[int, ...] = (64, 32)
    cross: int = 2
    rank: int | None = None
    backbone: Backbone = "hstu"
    width: int = 32
    blocks: int = 2
    heads: int = 2
    experts: int = 4
    longest: int = 200
    dropout: float = 0.0
    unknown: float = 0.01
    bias_variance: float = 0.3
    variance: float = 0.01
    learning_rate: float = 5e-3
    rows_per_batch: int | None = None
    epochs: int = 30
    patience: int = 3

    def __post_init__(self) -> None:
        if self.model not in NETWORKS:
            raise ConfigError(
                f"method {self.label!r}: model must be one of {', '.join(NETWORKS)}, got {self.model!r}"
            )
        if self.backbone not in BACKBONES:
            raise ConfigError(
                f"method {self.label!r}: backbone must be one of {', '.join(BACKBONES)}, got "
                f"{self.backbone!r}"
            )
        counts = ["dim", "cross", "rank", "width", "blocks", "heads", "experts", "longest"]
        counts += ["rows_per_batch", "epochs", "patience"]
        for name, value in [(name, getattr(self, name)) for name in counts]:
            if value is not None and value < 1:
                raise ConfigError(f"method {self.label!r}: {name} must be at least 1, got {value}")
        if self.width % self.heads:
            raise ConfigError(
                f"method {self.label!r}: width must be a multiple of heads, got {self.width} and {self.heads}"
            )
        if self.model == GRM and not self.hidden:
            raise ConfigError(f"method {self.label!r}: hidden must give the units of the experts' layer")
        if not all(units >= 1 for units in self.hidden):
            raise ConfigError(
                f"method {self.label!r}: hidden must be numbers of units, got {list(self.hidden)}"
            )
        for name in ("learning_rate", "bias_variance", "variance"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"method {self.label!r}: {name} must be above 0, got {getattr(self, name)}")
        for name in ("dropout", "unknown"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"method {self.label!r}: {name} must lie in [0, 1), got {getattr(self, name)}"
                )

    def complete(self, rows: int) -> RankingMethod:
        """Decide the settings that are None from the number of rows in training."""
        if self.rows_per_batch is not None:
            return self
        return replace(self, rows_per_batch=int(np.clip(rows // 80, 256, 8192)))


def default_methods() -> dict[str, RankingMethod]:
    """Return DCN-v2, DLRM and a factorisation machine."""
    return {
        "dcn": RankingMethod("DCN-v2"),
        "dlrm": RankingMethod("DLRM", "dlrm", dropout=0.2),
        "fm": RankingMethod("FM", "fm", variance=0.05, learning_rate=3e-3),
    }


@dataclass(frozen=True)
class RankingConfig:
    """An experiment on rows with all settings decided.

    Attributes:
      label: The column to predict: 0 and 1, or any numbers.
      features: Columns of ids, the task among them, and of lists of ids.
      numbers: Columns of numbers, floats or whole numbers.
      item: The column of items, for baselines and groups; None: there is none.
      user: The column of users, for baselines, groups and GAUC; None: rows have no user.
      time: The column of times, for GRM and for the baseline with drift; empty: times aren't used.
      exposed: A column that is nonzero in the rows to predict. The other rows are events, such as views,
        which only GRM reads, as history. Empty: all rows are predicted.
      protocol: Which rows are trained on (`gmeta.experiment.ranking.examples`).
      binary: Whether labels are 0 and 1.
      negatives: Rows with the label 0 that are drawn for each row with the label 1; None: there are none.
      seeds: Each method trains once per seed. The seed sets initial weights, initial rows and row order.
      budget: About how long settings of methods are tried in validation, such as ``"2m"``; ``"0"``: no
        trials.
      blend: Whether to also fit the blend of all models and baselines.
      methods: Method name -> how it is trained.

    Example:
      A TOML file gives only the settings that differ from those that the data set suggests::

        for = "ranking"
        protocol = "random"
        [methods.dcn]
        label = "DCN-v2"
        cross = 3
    """

    label: str
    features: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    item: str | None = None
    user: str | None = None
    time: str = ""
    exposed: str = ""
    protocol: Protocol = "random"
    binary: bool = True
    negatives: DrawnNegatives | None = None
    seeds: tuple[int, ...] = (0,)
    budget: str = "0"
    blend: bool = True
    methods: Mapping[str, RankingMethod] = field(default_factory=default_methods)

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {self.protocol!r}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds must be given, each once, got {list(self.seeds)}")
        if not self.features:
            raise ConfigError("features must name a column of ids at least")
        for key in ("features", "numbers"):
            named = [*getattr(self, key), self.label]
            if twice := sorted({name for name in named if named.count(name) > 1}):
                raise ConfigError(f"{key} names {', '.join(twice)} twice, or the label")
        if not self.methods and not self.blend:
            raise ConfigError("an experiment needs at least one method, or blend = true")
        for name, method in self.methods.items():
            if method.model == GRM:
                self._check_histories(name)
        if BLEND in self.methods:
            raise ConfigError(f"a method can't be called {BLEND!r}: this is the blend of all of them")
        if self.negatives is not None and not (self.binary and self.user and self.item):
            raise ConfigError(
                "negatives are items that a user doesn't have, with the label 0: they need columns of users "
                "and items, and labels of 0 and 1"
            )
        budget_seconds(self.budget)

    def _check_histories(self, name: str) -> None:
        """Check that the settings give a GRM earlier rows to read."""
        for key, value, option in (("user", self.user, "--task"), ("time", self.time, "--time")):
            if not value:
                raise ConfigError(
                    f"methods.{name}: model = {GRM!r} reads the earlier rows of a row's user, but the data "
                    f'have no {key}s: name a column, {key} = "COLUMN", or prepare them with {option} COLUMN'
                )
        if self.protocol == "tasks":
            raise ConfigError(
                f"methods.{name}: model = {GRM!r} reads the earlier rows of a row's user in training, and "
                "protocol 'tasks' tests users without any: choose protocol 'time' or 'random'"
            )

    @property
    def encoded(self) -> tuple[str, ...]:
        """The columns whose ids are numbered: the features, the user and the item."""
        others = (name for name in (self.user, self.item) if name is not None)
        return tuple(dict.fromkeys((*self.features, *others)))
