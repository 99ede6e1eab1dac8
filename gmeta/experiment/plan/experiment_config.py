"""The settings of a cold-start experiment and of its methods.

An experiment has a data set, several methods, several seeds and one evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np

from gmeta import io
from gmeta.core.errors import ConfigError
from gmeta.core.json_values import folder_name
from gmeta.core.settings import parse_duration
from gmeta.experiment.baselines import NAMES as BASELINES
from gmeta.io.cuts.task_choice import By, TaskChoice, check_bounds
from gmeta.io.readers.read_options import OneEpoch
from gmeta.layers.embedding.feature_config import Combiner
from gmeta.meta import InnerLoop
from gmeta.models.zoo.factor_model import FACTOR_LOOP, FactorSettings

FACTORS = "factor_ridge"
"""The model that takes a method's ``factors`` and an experiment's ``labels`` and ``task_columns``."""


@dataclass(frozen=True)
class MethodConfig:
    """The training settings of one method.

    Attributes:
      label: Its name in tables and figures.
      description: One sentence that describes it.
      inner: The inner loop; ``steps = 0`` trains without adaptation.
      outer_samples: Which samples the outer loss covers, ``"query"`` or ``"all"``.
      learning_rate: Adam's rate in the outer loop.
      row_learning_rate: Adam's rate for the embedding rows; None: the same. A row is updated only in steps
        that read it. So the row of a rare id takes far fewer steps than a dense weight does, and fewer than
        it would with an Adam that updates every row in every step.
      schedule: ``"constant"``; or ``"one_cycle"``: the rate rises and falls over all epochs, as
        `gmeta.optimizers.OneCycle` does. ``row_learning_rate``, if given, stays constant.
      epochs: Passes over the training tasks.
      query: The query set of a training task, if it differs from the experiment's: a number of rows, or a
        share of the task's. A ridge head learns most if most rows are query rows.
      model: One of `gmeta.experiment.runs.model_choice.MODELS`.
      factors: Sizes and priors of the model ``"factor_ridge"``; other models don't take them.
    """

    label: str
    description: str
    inner: InnerLoop = field(default_factory=InnerLoop)
    outer_samples: Literal["query", "all"] = "query"
    learning_rate: float = 1e-3
    row_learning_rate: float | None = None
    schedule: Literal["constant", "one_cycle"] = "constant"
    epochs: int = 10
    query: int | float | None = None
    model: str = "melu"
    factors: FactorSettings = field(default_factory=FactorSettings)

    def __post_init__(self) -> None:
        rates = [rate for rate in (self.learning_rate, self.row_learning_rate) if rate is not None]
        if self.epochs < 1 or min(rates) <= 0:
            raise ConfigError(
                f"method {self.label!r}: epochs must be at least 1 and learning rates above 0, "
                f"got {self.epochs} and {rates}"
            )
        if self.query is not None:
            check_share(f"method {self.label!r}: query", self.query)
        if self.model != FACTORS and self.factors != FactorSettings():
            raise ConfigError(
                f"method {self.label!r}: factors are the settings of the model {FACTORS!r}, and this one is "
                f"{self.model!r}: leave them out"
            )


def check_share(what: str, query: int | float) -> None:
    """Require that a query set is a number of rows or a share of a task's rows.

    Raises:
      ConfigError: The value isn't above 0, or is a float of 1 or more.
    """
    if query <= 0 or (isinstance(query, float) and query >= 1):
        raise ConfigError(f"{what} must be a number of rows or a share below 1, got {query}")


def _factors(epochs: int) -> MethodConfig:
    return MethodConfig(
        "factor model",
        "Items are vectors of their id and attributes; a task's head is solved for by ridge regression.",
        inner=FACTOR_LOOP,
        learning_rate=5e-3,
        schedule="one_cycle",
        epochs=epochs,
        query=0.7,
        model=FACTORS,
    )


def default_methods() -> dict[str, MethodConfig]:
    """Return the factor model, MAML and joint training, with settings for MovieLens-100K."""
    rate = 5e-3
    return {
        "factor_model": _factors(25),
        "maml": MethodConfig(
            "MAML",
            "MeLU trained by second-order MAML: the decision layers adapt in the inner loop.",
            inner=InnerLoop(steps=1, learning_rate=rate, order=2),
            learning_rate=5e-3,
        ),
        "joint": MethodConfig(
            "joint training",
            "The same network trained on all ratings of the warm users without an inner loop; "
            "its steps are fine-tuning.",
            inner=InnerLoop(steps=0, learning_rate=rate),
            outer_samples="all",
            learning_rate=1e-3,
            epochs=12,
        ),
    }


_STEPS = 1500


def own_methods(steps_per_epoch: int) -> dict[str, MethodConfig]:
    """Return the same methods for the user's own data, with enough epochs for about 1,500 steps.

    The number of epochs is at least 3, and at most 40 for the factor model and 20 for the others.

    Args:
      steps_per_epoch: The number of steps in an epoch.
    """
    epochs = min(max(-(-_STEPS // max(steps_per_epoch, 1)), 3), 40)
    fewer = min(epochs, 20)  # with more, the networks overfit small data
    inner = InnerLoop(steps=2, learning_rate=0.1, order=2)
    return {
        "factor_model": _factors(epochs),
        "maml": MethodConfig(
            "MAML",
            "Trained by second-order MAML: the decision layers adapt to a task in the inner loop.",
            inner=inner,
            learning_rate=5e-3,
            epochs=fewer,
        ),
        "joint": MethodConfig(
            "joint training",
            "The same network trained on all rows without an inner loop; its steps are fine-tuning.",
            inner=InnerLoop(steps=0, learning_rate=0.1),
            outer_samples="all",
            learning_rate=2e-3,
            epochs=fewer,
        ),
    }


# How negatives are drawn, if rows are only positive.

NegativeLaw = Literal["uniform", "popularity"]
NEGATIVE_LAWS: tuple[str, ...] = get_args(NegativeLaw)
NEGATIVES_ADVICE = "--set 'negatives={law=\"uniform\", count=4}'"
"""How negatives are drawn, in messages."""


@dataclass(frozen=True)
class DrawnNegatives:
    """Negatives for implicit feedback, whose rows are all positive (`gmeta.experiment.ranking.drawn_data`).

    Attributes:
      law: ``"uniform"``: each item is as likely as any other; ``"popularity"``: in proportion to its rows.
      count: The number of negatives for each positive row.
      seed: The seed of the draws.
    """

    law: NegativeLaw = "uniform"
    count: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.law not in NEGATIVE_LAWS:
            raise ConfigError(f"negatives: law must be {' or '.join(NEGATIVE_LAWS)}, got {self.law!r}")
        if self.count < 1 or self.seed < 0:
            raise ConfigError(
                f"negatives: count must be at least 1 and seed at least 0, got {self.count} and {self.seed}"
            )


def describe_negatives(settings: DrawnNegatives) -> str:
    """Return how negatives are drawn, as a sentence."""
    law = "evenly" if settings.law == "uniform" else "in proportion to the items' rows"
    return (
        f"Each positive row has up to {settings.count:,} negatives, of items that the user doesn't have, "
        f"drawn {law}: once, so that all methods and baselines see the same rows."
    )


# An experiment's settings of a column: how ids are embedded, and how numbers are scaled.

MAX_WIDTH = 1 << 16
"""The most units of a layer, and numbers of an embedding."""


@dataclass(frozen=True)
class FeatureSettings:
    """The settings of a column of ids.

    Attributes:
      dim: Width of its embedding; None: the experiment's ``embedding_dim``.
      hash: Whether its ids are hashed. Clients of an exported model then send text, and ids may be any
        numbers. None: as `gmeta prepare` stored the column.
      combiner: How a row's several ids are combined into one vector; None: their mean, if the column holds
        lists.
      table: The embedding table, if the column shares it with another column; None: a separate table.
      max_length: How many of a row's last ids are used; None: all.
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


# The facts about training labels that a model with priors needs: their number and mean.

_TASKS = 256  # per element


@dataclass(frozen=True)
class LabelFacts:
    """The training labels.

    Attributes:
      count: The number of labels.
      mean: Their mean; where the loss is a cross-entropy, the share of those that count as 1.
    """

    count: int
    mean: float

    def __post_init__(self) -> None:
        if self.count < 1 or not np.isfinite(self.mean):
            raise ConfigError(f"labels: there must be one, and their mean a number, got {self}")


def read_labels(path: Path, label: str, positive: float | None, choice: TaskChoice) -> LabelFacts:
    """Read all training labels.

    Args:
      path: The folder of a data set, followed by the split.
      label: Their column.
      positive: Labels of at least this value count as 1, others as 0; None: labels are unchanged.
      choice: Which tasks to read.
    """
    options = io.ReadOptions(shuffle=False, shard=(0, 1))
    elements = io.groups(path, groups_per_element=_TASKS, start=OneEpoch(), options=options)
    count, total = 0, 0.0
    for element in elements.map(choice):
        labels = element["columns"][label].numpy().astype(np.float64)
        count += len(labels)
        total += float((labels if positive is None else labels >= positive).sum())
    return LabelFacts(count, float(f"{total / max(count, 1):.6g}"))


def budget_seconds(budget: str) -> float:
    """Return the seconds of a budget.

    Raises:
      ConfigError: As for `gmeta.core.settings.parse_duration`.
    """
    return parse_duration(budget, "budget")


MAX_STEPS = 1 << 20
Loss = Literal["mse", "binary_crossentropy"]
NamedFeatures = Literal["movielens", "melu", "melu+year", "melu+year+writer"]
HELD_OUT = "held-out"
"""The split name of the tasks that `ExperimentConfig.held_out` keeps out of training."""


@dataclass(frozen=True)
class ExperimentConfig:
    """A cold-start experiment with all settings decided.

    The defaults suit MovieLens. `gmeta.experiment.plan.own_plan` describes the defaults for the user's own
    data set, and which keys a settings file may then leave out.

    Attributes:
      seeds: Each method trains once per seed. The seed sets initial weights, initial rows and task order.
      tasks_per_batch: Tasks in one step.
      train_split: The split that is trained on.
      test_splits: The splits that are measured, each in a separate table. The first one is also measured
        after each epoch, and for the curve of error against support size.
      held_out: With N, one of N tasks of ``train_split`` is never trained on; these tasks are measured as the
        split ``"held-out"``. 0: all tasks are trained on.
      held_out_part: Which of these N parts is held out, from 0 to N - 1. N runs with different parts can be
        measured as one by `gmeta evaluate`.
      held_out_by: ``"hash"``: a hash of the task's id determines its part. ``"id"``: the id modulo N.
      measured_rows: The minimum and maximum number of rows of a measured task; 0 as the maximum: no limit.
        Other tasks of the test splits aren't measured; those of ``train_split`` are trained on, so only the
        tasks of a part within these bounds are held out. None: tasks of any size are measured.
      query: The number of rows in a task's query set, or their share of the task's rows; the other rows are
        the support set.
      rows: ``"latest"``: the query set is a task's last rows. ``"random"``: it is drawn once, as a function
        of the task alone, so that every method and seed is measured on the same rows.
      resample: In training, draw new support and query sets in each epoch.
      features: Which columns are embedded. ``"movielens"``: year, genre, gender, age, occupation and area.
        ``"melu"``: the columns of MeLU's MovieLens-1M, which are rate, genre, director, actor, gender, age,
        occupation and zipcode. ``"melu+year"``: those and the year; ``"melu+year+writer"``: those, the year
        and the writers. Or a table, column -> `FeatureSettings`.
      numbers: Column of numbers that the network takes without an embedding -> its scale.
      label: The column to predict.
      labels: The number and mean of training labels, for the model ``"factor_ridge"``; None: `gmeta train`
        reads them if a method has that model.
      task_columns: The features that are the same in all rows of a task, such as a user's age, for the same
        model; `gmeta train` finds them among the user's own columns.
      label_scale: With ``"mse"``, the scale on which labels are learned; None: they aren't scaled.
      item: The column of items, for the baselines; None: no such column, so they use overall means.
      loss: ``"mse"``: regression of labels. ``"binary_crossentropy"``: the output is the logit of a label
        being at least ``positive``; for ratings, only AUC and nDCG are then measured.
      positive: The threshold for that loss: a rating, or 0.5 where labels are 0 and 1.
      embedding_dim: The default width of embeddings; ``"factor_ridge"`` has its own.
      hidden: Units of the hidden layers; ``"factor_ridge"`` has none.
      evaluation_steps: Numbers of inner steps after which tasks are measured.
      support_sizes: The sizes for the curve of error against support size: a task uses only this many of its
        last support samples, or all if it has fewer. Empty: no curve.
      support_steps: Inner steps for that curve.
      negatives: The rows with the label 0 that `gmeta train` draws for each row with the label 1
        (`gmeta.experiment.ranking.drawn_data`); None: there are none.
      methods: Method name -> how it is trained.
      budget: About how long `gmeta train` tries settings of methods on training tasks before it trains
        (`gmeta.experiment.search.trials`), as in ``"90s"``, ``"2m"`` or ``"1h"``; ``"0"``: no trials. It
        applies only if ``methods`` isn't given. ``"2m"`` for the user's own data, if neither is given.

    Example:
      A TOML file gives only what differs from these defaults::

        seeds = [0, 1, 2]
        [methods.maml]
        label = "MAML"
        description = "second order, five steps"
        inner = { steps = 5, learning_rate = 5e-3 }
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    tasks_per_batch: int = 32
    train_split: str = "warm"
    test_splits: tuple[str, ...] = ("cold",)
    held_out: int = 0
    held_out_part: int = 0
    held_out_by: By = "hash"
    measured_rows: tuple[int, int] | None = None
    query: int | float = 10
    rows: Literal["latest", "random"] = "latest"
    resample: bool = True
    features: NamedFeatures | Mapping[str, FeatureSettings] = "movielens"
    numbers: Mapping[str, NumberScale] = field(default_factory=dict)
    label: str = "rating"
    labels: LabelFacts | None = None
    task_columns: tuple[str, ...] = ()
    label_scale: NumberScale | None = None
    item: str | None = "item"
    loss: Loss = "mse"
    positive: float = 4.0
    embedding_dim: int = 32
    hidden: tuple[int, ...] = (64, 64)
    evaluation_steps: tuple[int, ...] = (0, 1, 3, 5)
    support_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    support_steps: int = 5
    negatives: DrawnNegatives | None = None
    methods: Mapping[str, MethodConfig] = field(default_factory=default_methods)
    budget: str = "0"

    def __post_init__(self) -> None:
        budget_seconds(self.budget)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds must be given, each once, got {list(self.seeds)}")
        if not self.test_splits or len(set(self.test_splits)) != len(self.test_splits):
            raise ConfigError(f"test_splits must be given, each once, got {list(self.test_splits)}")
        check_share("query", self.query)
        if not self.evaluation_steps:
            raise ConfigError("evaluation_steps must be given, got []")
        for name, (least, most) in _BOUNDS.items():
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                if not least <= value <= most:
                    raise ConfigError(f"{name} must lie in [{least}, {most}], got {value}")
        if not (self.held_out > 1 if HELD_OUT in self.test_splits else self.held_out == 0):
            raise ConfigError(
                f"held_out={self.held_out} keeps one in this many tasks for the test split {HELD_OUT!r}: "
                f"give both held_out of at least 2 and test_splits with {HELD_OUT!r}, or neither"
            )
        if not 0 <= self.held_out_part < max(self.held_out, 1) or (self.held_out_by, self.held_out) == (
            "id",
            0,
        ):
            raise ConfigError(
                f"held_out_part={self.held_out_part} and held_out_by={self.held_out_by!r} choose which of "
                f"held_out={self.held_out} parts is held out: give a part from 0 to held_out - 1, or neither"
            )
        if self.measured_rows is not None:
            check_bounds("measured_rows", self.measured_rows)
        if not self.features:
            raise ConfigError("features must name at least one column of ids")
        unknown = sorted(set(self.task_columns) - set(self.columns)) if self.own_columns else []
        if unknown:
            raise ConfigError(f"task_columns names {', '.join(unknown)}, which aren't among the features")
        both = sorted(set(self.numbers) & set(self.features)) if self.own_columns else []
        if both:
            raise ConfigError(f"{', '.join(both)} can't be among features and numbers: leave one out")
        if self.support_sizes and self.loss != "mse":
            raise ConfigError(
                f"support_sizes are for a curve of rating errors, which loss={self.loss!r} has none of: "
                "give support_sizes = []"
            )
        if not self.methods:
            raise ConfigError("an experiment needs at least one method")
        for name in self.methods:  # a method's name is also that of a folder of the run
            try:
                plain = not folder_name(name, "a method's name").startswith(".") and name not in _TAKEN
            except ValueError:
                plain = False
            if not plain:
                raise ConfigError(
                    f"method {name!r}: a method's name is its folder's in the run: give it no slash, no dot "
                    f"in front, and none of {', '.join(_TAKEN)}"
                )
        taken = sorted(set(self.methods) & set(BASELINES))
        if taken:
            raise ConfigError(
                f"method {taken[0]!r} has the name of a baseline: none of {', '.join(BASELINES)}"
            )

    @property
    def own_columns(self) -> bool:
        """Whether features are the user's own columns rather than those of MovieLens."""
        return not isinstance(self.features, str)

    @property
    def needs_labels(self) -> bool:
        """Whether a method's model needs `labels`."""
        return any(method.model == FACTORS for method in self.methods.values())

    @property
    def columns(self) -> list[str]:
        """The user's own columns of ids and numbers that the network takes; empty for MovieLens."""
        return [] if isinstance(self.features, str) else [*self.features, *self.numbers]


_BOUNDS = {
    "seeds": (-(2**62), 2**62),
    "tasks_per_batch": (1, 2**31 - 1),
    "embedding_dim": (1, MAX_WIDTH),
    "hidden": (1, MAX_WIDTH),
    "evaluation_steps": (0, MAX_STEPS),
    "support_sizes": (1, 2**31 - 1),
    "support_steps": (0, MAX_STEPS),
}
_TAKEN = ("data", "tune", "figures", "config.json", "evaluation.json", "report.html")
