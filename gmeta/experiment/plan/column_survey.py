"""A look at the rows that are trained on, for what a manifest doesn't say: which values columns hold."""

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
"""Rows that are looked at, in a drawn order of tasks; all of a smaller split."""

_TASKS = 256  # an element


@dataclass(frozen=True)
class IdSurvey:
    """What ids a column holds.

    Attributes:
      least: The smallest.
      most: The largest.
      distinct: How many there are.
      of_tasks: How many pairs of a task and an id of its rows there are.
    """

    least: int
    most: int
    distinct: int
    of_tasks: int


@dataclass(frozen=True)
class NumberSurvey:
    """What numbers a column holds.

    Attributes:
      least: The smallest of the finite ones.
      most: The largest of them.
      mean: Of the finite ones.
      deviation: Their standard deviation.
      zero_or_one: Whether all of them are 0 or 1.
      not_finite: How many are NaN or infinite.
    """

    least: float
    most: float
    mean: float
    deviation: float
    zero_or_one: bool
    not_finite: int


@dataclass(frozen=True)
class Survey:
    """What rows hold.

    Attributes:
      rows: How many were looked at.
      tasks: Of how many tasks, or batches of such.
      ids: Column of one id a row -> what is in it.
      numbers: Column of one number a row, the label among them -> what is in it.
    """

    rows: int
    tasks: int
    ids: dict[str, IdSurvey]
    numbers: dict[str, NumberSurvey]


def survey(path: Path, schema: Schema, label: str, choice: io.TaskChoice) -> Survey:
    """Look at the rows of some tasks of a split; the same ones each time.

    Args:
      path: A data set's folder and a split.
      schema: Its columns.
      label: The column to predict, a number whatever its type.
      choice: Which tasks are meant.
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
    """The column that most likely says which item a row is about.

    An item is met by several tasks, and a task meets several items; of the columns of which that is so, by a
    factor of 3/2 on average, it is the one with the most ids. A user's own city has one id a task, and the
    number of a session is of one task.
    """
    fitting = [
        name
        for name in columns
        if 2 * found.ids[name].of_tasks >= 3 * max(found.tasks, found.ids[name].distinct)
    ]
    return max(fitting, key=lambda name: found.ids[name].distinct, default=None)
