"""A survey of the training rows: which values each column holds. The manifest doesn't record this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gmeta import io
from gmeta.core.data.schema import Schema

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
      zero_or_one: Whether all of the finite numbers are 0 or 1.
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


def survey(path: Path, schema: Schema, label: str, choice: io.TaskChoice) -> Survey:
    """Survey the rows of some tasks of a split; each call reads the same tasks.

    Args:
      path: The folder of a data set, followed by the split.
      schema: The data set's columns.
      label: The column to predict; it counts as a number whatever its type.
      choice: Which tasks to read.
    """
    single = [c for c in schema if not c.is_list and c.name not in (schema.task, schema.batch)]
    kept: dict[str, list[NDArray[Any]]] = {column.name: [] for column in single}
    tasks: list[NDArray[np.int64]] = []
    rows = 0
    elements = io.groups(
        path, groups_per_element=_TASKS, start=io.OneEpoch(), options=io.ReadOptions(shard=(0, 1), seed=0)
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
    qualify, since it has one id per task; nor does a session number, since it occurs in one task.
    """
    fitting = [
        name
        for name in columns
        if 2 * found.ids[name].of_tasks >= 3 * max(found.tasks, found.ids[name].distinct)
    ]
    return max(fitting, key=lambda name: found.ids[name].distinct, default=None)
