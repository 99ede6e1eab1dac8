"""The full settings of an experiment: a settings file, if any, completed from the data set.

MovieLens has the defaults of `ExperimentConfig`. If it was prepared as one split, users whose id is divisible
by 5 and who have 13 to 100 ratings are measured, and all others are trained on. For other data sets, the
defaults are:

* The label is the one that the data set was prepared with.
* Features are all columns of whole numbers except the task, the time and the label. A column is hashed if it
  was prepared as hashed, and a list is pooled by ``"sqrtn"``. Columns of floats are standardised numbers. A
  column with a distinct value in nearly every row, or one value in all rows, is left out; so is a list of
  floats.
* The item is the column that `gmeta.experiment.plan.own_columns.likeliest_item` finds.
* The loss is ``"binary_crossentropy"`` if all surveyed labels are 0 or 1, and otherwise ``"mse"``.
* If the data set has one split, one of five tasks is held out. Otherwise, ``warm`` or ``train`` is trained
  on, and the other splits are measured.
* Settings of methods are chosen by trials on training tasks (`gmeta.experiment.search`), within two minutes.
* A fifth of a task's rows are its query set: in training, a new random draw in each epoch; in measurement,
  the latest rows, or, without times, a random draw that is the same for all methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.settings import from_mapping
from gmeta.experiment.plan.experiment_config import (
    HELD_OUT,
    NEGATIVES_ADVICE,
    ExperimentConfig,
    budget_seconds,
    own_methods,
    read_labels,
)
from gmeta.experiment.plan.own_columns import ColumnPlan, Survey, survey
from gmeta.experiment.plan.task_sets import count_measured, count_trained, training_choice
from gmeta.io.reader_stats import data_errors

HELD_OUT_OF = 5
"""If a data set has a single split, one in this many tasks is held out."""

BUDGET = "2m"
"""The time in which settings of methods are chosen, if nothing is given."""

_OF_MOVIELENS = {"task", "item", "rating", "year", "genre", "gender", "age", "occupation", "area"}
_UNDIVIDED_MOVIELENS: Mapping[str, Any] = {
    "train_split": "train",
    "test_splits": [HELD_OUT],
    "held_out": HELD_OUT_OF,
    "held_out_by": "id",
    "measured_rows": [13, 100],
}
_DIVISION = {"train_split", "test_splits", "held_out"}  # settings that divide the tasks


@dataclass(frozen=True)
class Planned:
    """An experiment, and sentences that describe the decisions made for it."""

    config: ExperimentConfig
    notes: tuple[str, ...] = ()


def plan_experiment(given: Mapping[str, Any], data: Path, where: str = "config") -> Planned:
    """Decide the settings that aren't given.

    Args:
      given: Keys of `ExperimentConfig` and values. For the user's own data, ``features`` may be a list of
        names, or a table of `FeatureSettings` without those that the data set defines; ``numbers`` may be a
        list.
      data: A prepared data set.
      where: The name of the settings in error messages.

    Raises:
      ConfigError: A key or a value is unknown; a column is missing from the data set, or can't have the role
        that the settings assign; or there is no label.
      DataError: The data set can't be read, or its labels are all the same or not finite.
    """
    if "methods" in given and budget_seconds(str(given.get("budget", "0"))):
        raise ConfigError(
            f"{where}: budget is for the choice of methods' settings, and methods are given: leave out either"
        )
    manifest = Manifest.load(data)
    names = {column.name for column in manifest.schema}
    if isinstance(given.get("features"), str) or ("features" not in given and names >= _OF_MOVIELENS):
        undivided = tuple(manifest.splits) == ("train",) and not given.keys() & _DIVISION
        config = from_mapping(
            ExperimentConfig, {**(_UNDIVIDED_MOVIELENS if undivided else {}), **given}, where
        )
        _, note = _count_tasks(config, data)
        return Planned(_with_labels(config, data), (note,))
    return _Plan(given, data, manifest, where).make()


class _Plan(ColumnPlan):
    """The state of planning an experiment on the user's own data set."""

    def __init__(self, given: Mapping[str, Any], data: Path, manifest: Manifest, where: str) -> None:
        super().__init__(given, data, manifest, where)
        self.splits = list(manifest.splits)

    def make(self) -> Planned:
        """Decide all settings of the experiment."""
        label = self._label()
        timed = self.table.get("time") or "timestamp" in self.schema  # as in MovieLens folders
        settings = {
            "query": 0.2,
            "rows": "latest" if timed else "random",
            "resample": True,
            "seeds": [0],
            "budget": "0" if "methods" in self.given else BUDGET,
            **self._splits(),
            **self.given,
            "label": label,
        }
        for name in ("features", "numbers"):
            settings.pop(name, None)
        given = from_mapping(
            ExperimentConfig, settings | _ANY, self.where
        )  # checks the types of the given values
        with data_errors():
            found = survey(self.data / given.train_split, self.schema, label, training_choice(given))
        settings |= self._loss(found, label)
        settings["features"] = self.features(found, label)
        settings["numbers"] = self.numbers(found, label, settings["features"])
        settings["item"] = self.item(found, settings["features"])
        settings.setdefault("support_sizes", [1, 2, 4, 8, 16] if settings["loss"] == "mse" else [])
        config = from_mapping(ExperimentConfig, settings, self.where)
        tasks, note = _count_tasks(config, self.data)
        self.notes.append(note)
        if config.rows == "random" and "rows" not in self.given:
            self.notes.append("there are no times: measures rows that are drawn at random from each task")
        if "methods" not in self.given:
            config = replace(config, methods=own_methods(-(-tasks // config.tasks_per_batch)))
        if config.needs_labels and "task_columns" not in self.given:
            config = replace(config, task_columns=self.task_columns(found, config.columns, config.item))
        return Planned(_with_labels(config, self.data), tuple(self.notes))

    def _label(self) -> str:
        label = self.given.get("label", self.table.get("label"))
        if label is None:
            raise ConfigError(
                f"{self.data} was prepared without a label: prepare it with --label COLUMN, or name one in "
                f'--config, label = "COLUMN"; its columns are {self.names}'
            )
        self.check("label", [label], lists=False)
        if (self.table.get("columns") or {}).get(label, {}).get("hash"):
            raise ConfigError(
                f"{self.data}: label {label!r} is hashed text, and its numbers have no meaning: prepare the "
                "data set with a number as the label"
            )
        return str(label)

    def _splits(self) -> dict[str, Any]:
        train = self.given.get("train_split")
        train = train or next((name for name in ("warm", "train") if name in self.splits), self.splits[0])
        others = [name for name in self.splits if name != train]
        held_out = self.given.get("held_out", 0 if others else HELD_OUT_OF)
        tests = self.given.get("test_splits", [HELD_OUT] if held_out else others)
        return {
            "train_split": train,
            "test_splits": tests,
            "held_out": held_out if HELD_OUT in tests or "held_out" in self.given else 0,
        }

    def _loss(self, found: Survey, label: str) -> dict[str, Any]:
        """Decide on the loss and the settings that depend on it."""
        if not found.rows:
            raise DataError(
                "no task is left to train on",
                path=self.data,
                advice="prepare more data, give another held_out, or --for ranking",
            )
        values = found.numbers[label]
        if values.not_finite:
            raise DataError(
                f"label {label!r} is NaN or infinite in {values.not_finite:,} of {found.rows:,} rows",
                path=self.data,
                advice="prepare it again without such rows",
            )
        if values.least == values.most:
            raise DataError(
                f"label {label!r} is {values.least:g} in all of {found.rows:,} rows: nothing can be learnt",
                path=self.data,
                advice=f"if every row is a positive, draw negatives: {NEGATIVES_ADVICE}; else keep rows of "
                "either kind, such as what was shown and not clicked",
            )
        loss = self.given.get("loss", "binary_crossentropy" if values.zero_or_one else "mse")
        if loss == "mse":
            self.notes.append(f"predicts {label}, {values.least:g} to {values.most:g}, by its squared error")
            return {"loss": loss, "label_scale": {"mean": values.mean, "deviation": values.deviation}}
        if not values.zero_or_one and "positive" not in self.given:
            raise ConfigError(
                f'{self.where}: loss = "{loss}", but label {label!r} is {values.least:g} to {values.most:g}: '
                "give the threshold of positive labels, positive = NUMBER"
            )
        positive = self.given.get("positive", 0.5)
        kind = "0 or 1" if values.zero_or_one else f"a yes from {positive:g} on"
        self.notes.append(f"predicts whether {label}, {kind}, by the cross-entropy")
        return {"loss": loss, "positive": positive}


def _count_tasks(config: ExperimentConfig, data: Path) -> tuple[int, str]:
    """Count the training tasks, and describe all counts in a sentence."""
    counts = [(config.train_split, count_trained(config, data))]
    counts += [(split, count_measured(config, data, split)) for split in config.test_splits]
    for split, (tasks, small) in counts:
        if not tasks:
            raise DataError(
                f"{split}: no task is large enough for a support and a query set; {small:,} are smaller"
                + (f" (measured_rows is {list(config.measured_rows)})" if config.measured_rows else ""),
                path=data,
                advice="prepare more data, give another query, held_out or measured_rows, or --for ranking",
            )
    small = sum({split: each for split, (_, each) in counts}.values())
    trained, *measured = (f"{tasks:,} tasks ({split})" for split, (tasks, _) in counts)
    passed = f"; passes over {small:,} that are too small to split" if small else ""
    return counts[0][1][0], f"trains on {trained}, measures {', '.join(measured)}{passed}"


def _with_labels(config: ExperimentConfig, data: Path) -> ExperimentConfig:
    """Complete an experiment with the label statistics that its models need."""
    if not config.needs_labels or config.labels is not None:
        return config
    with data_errors():
        positive = None if config.loss == "mse" else config.positive
        labels = read_labels(data / config.train_split, config.label, positive, training_choice(config))
    return replace(config, labels=labels)


_ANY: dict[str, Any] = {
    "features": "movielens",
    "numbers": {},
    "support_sizes": [],
    "methods": {"any": {"label": "any", "description": "any"}},
}
"""Placeholders for keys that are decided later, used while the other keys are checked."""
