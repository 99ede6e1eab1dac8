"""The choice of columns that an experiment takes from the user's own data set, and their roles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gmeta import io
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.merged_tables import HASHED_BITS
from gmeta.core.schema import Schema
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.experiment.plan.experiment_config import FeatureSettings
from gmeta.io.cuts.task_choice import TaskChoice
from gmeta.io.readers.read_options import OneEpoch

# A survey of the training rows: the values of each column, which the manifest doesn't record.

SURVEYED_ROWS = 1 << 20
"""The number of rows surveyed, from tasks in random order; a smaller split is surveyed whole."""

_TASKS = 256  # per element


@dataclass(frozen=True)
class IdSurvey:
    """The ids that a column holds.

    Attributes:
      least: The smallest id.
      most: The largest id.
      distinct: The number of distinct ids.
      of_tasks: The number of distinct pairs of a task and an id in its rows.
    """

    least: int
    most: int
    distinct: int
    of_tasks: int


@dataclass(frozen=True)
class NumberSurvey:
    """The numbers that a column holds.

    Attributes:
      least: The smallest finite number.
      most: The largest finite number.
      mean: The mean of the finite numbers.
      deviation: Their standard deviation.
      zero_or_one: Whether all finite numbers are 0 or 1.
      not_finite: How many numbers are NaN or infinite.
    """

    least: float
    most: float
    mean: float
    deviation: float
    zero_or_one: bool
    not_finite: int


@dataclass(frozen=True)
class Survey:
    """The contents of the surveyed rows.

    Attributes:
      rows: The number of rows surveyed.
      tasks: The number of tasks, or batches of tasks, that these rows belong to.
      ids: Column with one id per row -> its ids.
      numbers: Column with one number per row, including the label -> its numbers.
    """

    rows: int
    tasks: int
    ids: dict[str, IdSurvey]
    numbers: dict[str, NumberSurvey]


def survey(path: Path, schema: Schema, label: str, choice: TaskChoice) -> Survey:
    """Survey the rows of some tasks of a split; each call reads the same tasks.

    Args:
      path: The folder of a data set, followed by the split.
      schema: The data set's columns.
      label: The column to predict; it counts as a number, whatever its type.
      choice: Which tasks to read.
    """
    single = [c for c in schema if not c.is_list and c.name not in (schema.task, schema.batch)]
    kept: dict[str, list[NDArray[Any]]] = {column.name: [] for column in single}
    tasks: list[NDArray[np.int64]] = []
    rows = 0
    elements = io.groups(
        path, groups_per_element=_TASKS, start=OneEpoch(), options=io.ReadOptions(shard=(0, 1), seed=0)
    )
    for element in elements.map(choice):
        for name, columns in kept.items():
            columns.append(element["columns"][name].numpy())
        tasks.append(tf.repeat(element["task"], tf.experimental.numpy.diff(element["row_splits"])).numpy())
        rows += len(tasks[-1])
        if rows >= SURVEYED_ROWS:
            break
    values = {name: np.concatenate(columns)[:SURVEYED_ROWS] for name, columns in kept.items()}
    of_task = np.concatenate(tasks)[:SURVEYED_ROWS]
    ids = [c.name for c in single if c.dtype == "int64" and c.name != label] if len(of_task) else []
    numbers = [c.name for c in single if c.name not in ids] if len(of_task) else []
    return Survey(
        len(of_task),
        len(np.unique(of_task)),
        {name: _of_ids(values[name], of_task) for name in ids},
        {name: _of_numbers(values[name]) for name in numbers},
    )


def _of_ids(values: NDArray[np.int64], of_task: NDArray[np.int64]) -> IdSurvey:
    known, position = np.unique(values, return_inverse=True)
    pairs = np.unique(np.stack([of_task, position.astype(np.int64)]), axis=1).shape[1]
    return IdSurvey(int(known[0]), int(known[-1]), len(known), pairs)


def _of_numbers(values: NDArray[Any]) -> NumberSurvey:
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return NumberSurvey(np.nan, np.nan, np.nan, np.nan, False, len(numbers))
    least, most, mean, deviation = (
        float(f"{number:.6g}") for number in (finite.min(), finite.max(), finite.mean(), finite.std())
    )
    zero_or_one = bool(np.isin(finite, (0.0, 1.0)).all())
    return NumberSurvey(least, most, mean, deviation, zero_or_one, len(numbers) - len(finite))


def likeliest_item(found: Survey, columns: Sequence[str]) -> str | None:
    """Return the column that most likely holds the item of a row.

    An item occurs in several tasks, and a task has several items. A column qualifies if both numbers are at
    least 3/2 on average; among the qualifying columns, the one with the most ids wins. A user's city doesn't
    qualify, since it has one id per task; nor does a session number, since it occurs in one task. If no
    column qualifies, for example because most items occur once, the one with a typical name of items is used.
    """
    fitting = [
        name
        for name in columns
        if 2 * found.ids[name].of_tasks >= 3 * max(found.tasks, found.ids[name].distinct)
    ]
    if not fitting:
        fitting = [name for name in columns if _ITEM_NAME.fullmatch(name)]
    return max(fitting, key=lambda name: found.ids[name].distinct, default=None)


_ITEM_NAME = re.compile(
    r"(item|movie|film|product|article|news|book|video|track|song|artist|business|asin|isbn|sku)[\W_]*(id)?",
    re.IGNORECASE,
)

_MANY, _UNIQUE = 1000, 0.9  # with this many rows and nearly all ids distinct, ids number events
_ID_LIMIT = 1 << HASHED_BITS
"""Columns with ids of this size or larger are hashed. Smaller ids are their own hashes."""


class ColumnPlan:
    """The roles of columns, from the settings or else from the data set.

    Args:
      given: The settings.
      data: The data set.
      manifest: Its manifest.
      where: The name of the settings in error messages.

    Attributes:
      notes: Sentences that describe the decisions.
    """

    def __init__(self, given: Mapping[str, Any], data: Path, manifest: Manifest, where: str) -> None:
        self.given, self.data, self.schema, self.where = dict(given), data, manifest.schema, where
        self.table: Mapping[str, Any] = manifest.config.get("table") or {}
        self.notes: list[str] = []

    def features(self, found: Survey, label: str) -> dict[str, dict[str, Any]]:
        """Decide which columns to embed: column -> its settings; only the width may be undecided."""
        given = self.given.get("features")
        if given is None:
            own: dict[str, Any] = {name: {} for name in self._usable_ids(found, label)}
        elif isinstance(given, list | tuple):
            own = {name: {} for name in given}
        else:
            own = dict(given)
        self.check("features", list(own), dtype="int64")
        settings = {}
        for name, values in own.items():
            where = f"{self.where}.features.{name}"
            settings[name] = self._feature(name, from_mapping(FeatureSettings, values, where), found)
        if not settings:
            raise ConfigError(
                f"{self.data} has no column of ids to embed: prepare columns of text with hash = true; its "
                f"columns are {self.names}"
            )
        shown = (
            f"{name} ({each['combiner']})" if each["combiner"] else name for name, each in settings.items()
        )
        self.notes.append(f"features: {', '.join(shown)}")
        return settings

    def _feature(self, name: str, settings: FeatureSettings, found: Survey) -> dict[str, Any]:
        column = self.schema[name]
        prepared = bool((self.table.get("columns") or {}).get(name, {}).get("hash"))
        ids = found.ids.get(name)
        far = ids is not None and not (ids.least >= 0 and ids.most < _ID_LIMIT)
        if settings.hash is False and (prepared or far):
            why = "was hashed when it was prepared" if prepared else f"holds {ids.least if ids else ''}"
            raise ConfigError(
                f"{self.where}: features.{name}: hash = false, but the column {why}: leave hash out"
            )
        combiner = settings.combiner or ("sqrtn" if column.is_list else None)
        hashed = prepared or far if settings.hash is None else settings.hash
        return to_mapping(replace(settings, hash=hashed, combiner=combiner))

    def _usable_ids(self, found: Survey, label: str) -> list[str]:
        """Return all columns of ids that may help to predict the label."""
        usable, useless = [], []
        for column in self.schema:
            if column.dtype != "int64" or column.name in (*self._roles, label):
                continue
            ids = found.ids.get(column.name)
            if ids and ids.distinct == 1:
                useless.append(f"{column.name} (the same in all rows)")
            elif ids and found.rows >= _MANY and ids.distinct > _UNIQUE * found.rows:
                useless.append(f"{column.name} (another one in nearly every row)")
            else:
                usable.append(column.name)
        if useless:
            self.notes.append(f"left out: {', '.join(useless)}")
        return usable

    def numbers(self, found: Survey, label: str, features: Mapping[str, Any]) -> dict[str, Any]:
        """Decide on the columns of numbers: column -> its scale."""
        given = self.given.get("numbers")
        if given is None:
            taken = (*self._roles, label, *features)
            floats = [c for c in self.schema if c.dtype == "float32" and c.name not in taken]
            if lists := [column.name for column in floats if column.is_list]:
                self.notes.append(f"left out: {', '.join(lists)} (lists of floats)")
            given = [column.name for column in floats if not column.is_list]
            constant = [name for name in given if not found.numbers[name].deviation > 0]
            if constant:
                self.notes.append(f"left out: {', '.join(constant)} (the same in all rows)")
            given = [name for name in given if name not in constant]
        self.check("numbers", list(given), lists=False, dtype="float32")
        if label in given:
            raise ConfigError(f"{self.where}: numbers names {label!r}, which is the label: leave it out")
        if given:
            self.notes.append(f"numbers: {', '.join(given)}")
        if isinstance(given, Mapping):
            return dict(given)
        scales = {}
        for name in given:
            values = found.numbers[name]
            if not values.deviation > 0:
                raise ConfigError(
                    f"{self.where}: numbers names {name!r}, which is the same in all rows: leave it out"
                )
            scales[name] = {"mean": values.mean, "deviation": values.deviation}
        return scales

    def item(self, found: Survey, features: Mapping[str, Any]) -> str | None:
        """Choose the column whose means the baselines use; None if no column looks like an item."""
        item = self.given.get("item")
        if item is not None:
            self.check("item", [item], lists=False, dtype="int64")
            return str(item)
        names = [name for name in features if name in found.ids]
        if self.table.get("blocks"):  # in rows without users, whole numbers may be counts that vary widely
            own = self.table.get("columns") or {}
            names = [name for name in names if (own.get(name) or {}).get("hash")] or names
        item = likeliest_item(found, names)
        self.notes.append(
            f"item, whose mean is a baseline: {item}"
            if item
            else "no column looks like an item's id, so the baseline is the mean of all: name one as item"
        )
        return item

    def task_columns(self, found: Survey, columns: Sequence[str], item: str | None) -> tuple[str, ...]:
        """Find the features that are the same in all rows of a task."""
        same = [
            name
            for name in columns
            if name in found.ids and name != item and found.ids[name].of_tasks == found.tasks
        ]
        if same:
            self.notes.append(f"the same in all rows of a task: {', '.join(same)}")
        return tuple(same)

    @property
    def _roles(self) -> tuple[str | None, ...]:
        return self.schema.task, self.schema.batch, self.table.get("time")

    @property
    def names(self) -> str:
        """The names of the columns, for error messages."""
        return ", ".join(column.name for column in self.schema if column.name != self.schema.batch)

    def check(self, key: str, names: Sequence[str], *, lists: bool = True, dtype: str | None = None) -> None:
        """Raise an error if a column doesn't exist or can't have the role that ``key`` assigns."""
        for name in names:
            if not isinstance(name, str) or name not in self.schema:
                raise ConfigError(
                    f"{self.where}: {key} names {name!r}, which {self.data} doesn't have; "
                    f"its columns are {self.names}"
                )
            column = self.schema[name]
            if column.name in (self.schema.task, self.schema.batch):
                raise ConfigError(
                    f"{self.where}: {key} names {name!r}, which identifies tasks or batches: leave it out"
                )
            if column.is_list and not lists:
                raise ConfigError(
                    f"{self.where}: {key} names {name!r}, which holds lists: name one of one value per row"
                )
            if dtype is not None and column.dtype != dtype:
                use = "features take ids, numbers take floats"
                raise ConfigError(f"{self.where}: {key} names {name!r}, which is {column.dtype}: {use}")
