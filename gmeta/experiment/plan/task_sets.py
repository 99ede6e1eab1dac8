"""The tasks that an experiment trains on and measures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta import io
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.group_index import GroupIndex
from gmeta.core.schema import OnBad
from gmeta.experiment.plan.experiment_config import HELD_OUT, ExperimentConfig
from gmeta.io.cuts.task_choice import TaskChoice, keep
from gmeta.io.cuts.task_split import least_rows
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.read_options import OneEpoch, Start

DEFAULTS = io.ReadOptions()


def training_tasks(
    config: ExperimentConfig,
    data: Path,
    start: Start = 0,
    options: io.ReadOptions = DEFAULTS,
    query: int | float | None = None,
    choice: TaskChoice | None = None,
) -> tf.data.Dataset:
    """Read the tasks of the training split, in a new order each epoch; skip tasks too small to split.

    Args:
      config: The experiment.
      data: A prepared data set.
      start: As for `gmeta.io.tasks`.
      options: As for `gmeta.io.tasks`; ``seed`` sets the order of tasks and the random draws.
      query: The method's query set, if it differs from the experiment's.
      choice: The tasks of the training split to read instead of those that are trained on.
    """
    return io.tasks(
        data / config.train_split,
        tasks_per_batch=config.tasks_per_batch,
        rows=None if config.resample else config.rows,
        resample=config.resample,
        **{**_columns(config), **({} if query is None else {"query": query})},
        only=training_choice(config) if choice is None else choice,
        start=start,
        options=options,
    )


def measured_tasks(
    config: ExperimentConfig,
    data: Path,
    split: str,
    on_bad: OnBad = "raise",
    stats: ReaderStats | None = None,
    shard: tuple[int, int] | None = None,
    choice: TaskChoice | None = None,
) -> tf.data.Dataset:
    """Read the tasks of a split in the order of the files: the rank's part, or the part that ``shard`` names.

    Random draws depend on the task alone, not on the method or its seed. For the training split, these are
    the tasks that are trained on and have the size of a measured task. ``choice`` selects others instead.
    """
    return io.tasks(
        data / folder_of(config, split),
        tasks_per_batch=config.tasks_per_batch,
        rows=config.rows,
        **_columns(config),
        only=measured_choice(config, split) if choice is None else choice,
        options=io.ReadOptions(shuffle=False, on_bad=on_bad, stats=stats, shard=shard),
    )


def other_training_tasks(config: ExperimentConfig, data: Path, on_bad: OnBad = "raise") -> tf.data.Dataset:
    """Read all tasks that are trained on and that `measured_tasks` of the training split doesn't have.

    Returns:
      Elements of `gmeta.io.groups`: these tasks aren't cut.
    """
    fewest = min(least_rows(query) for query in training_queries(config))
    trained = training_choice(config).at_least(fewest)
    measured = measured_choice(config, config.train_split).at_least(least_rows(config.query))

    def others(element: dict[str, Any]) -> dict[str, Any]:
        rows = element["row_splits"][1:] - element["row_splits"][:-1]
        task = element["task"]
        return keep(element, trained.keeps(task, rows) & ~measured.keeps(task, rows))

    options = io.ReadOptions(shuffle=False, on_bad=on_bad, shard=(0, 1))
    path = data / config.train_split
    return io.groups(path, groups_per_element=_TASKS, start=OneEpoch(), options=options).map(others)


def training_queries(config: ExperimentConfig) -> dict[int | float, list[str]]:
    """Return each query set of training tasks -> the names of the methods that train with it."""
    found: dict[int | float, list[str]] = {}
    for name, method in config.methods.items():
        found.setdefault(config.query if method.query is None else method.query, []).append(name)
    return found


def count_trained(config: ExperimentConfig, data: Path, query: int | float | None = None) -> tuple[int, int]:
    """Count the tasks that are trained on, and those that are too small for a query set.

    Args:
      config: The experiment.
      data: A prepared data set.
      query: A method's query set; None: the one of `training_queries` by which the most tasks can be split.
    """
    queries = training_queries(config) if query is None else [query]
    fewest = min(map(least_rows, queries))
    return _count_both(config, data, config.train_split, training_choice(config), fewest)


def count_measured(config: ExperimentConfig, data: Path, split: str) -> tuple[int, int]:
    """Count the tasks of a split that are measured, and those that are too small for a query set."""
    return _count_both(config, data, split, measured_choice(config, split), least_rows(config.query))


def count_unmeasured(config: ExperimentConfig, data: Path, split: str) -> int:
    """Count the tasks of a test split that ``measured_rows`` leaves out."""
    choice = measured_choice(config, split)
    held_out = (1, 0) if split == HELD_OUT else choice.held_out_rows
    unbounded = replace(choice, held_out_rows=held_out, min_rows=1, max_rows=0)
    return _count(config, data, split, unbounded) - _count(config, data, split, choice)


_ONE_IN = (3, 4, 5, 7, 11, 13)
"""One in so many training tasks stands for a new one: the first number that has no divisor in common with
the experiment's ``held_out``, because both go by the same hash."""


def divide_training(
    config: ExperimentConfig, data: Path, fewest: int = 12
) -> tuple[TaskChoice, TaskChoice] | None:
    """Divide the training tasks by a hash of their ids: about two thirds to train on, a third as new tasks.

    Settings are chosen on these tasks, so that no test task is used.

    Args:
      config: The experiment.
      data: A prepared data set.
      fewest: The minimum number of tasks on either side.

    Returns:
      The choice of tasks to train on, and that of tasks to measure, which have the size of measured tasks;
      None if there are too few tasks.
    """
    trained = training_choice(config)
    sizes = config.measured_rows or (1, 0)
    for parts in (each for each in _ONE_IN if math.gcd(each, trained.parts) == 1):
        rest = TaskChoice(parts, held_out_rows=sizes, within=trained)
        asked = replace(rest, held_out=True, min_rows=sizes[0], max_rows=sizes[1])
        least = (min(map(least_rows, training_queries(config))), least_rows(config.query))
        counts = [
            _count(config, data, config.train_split, each.at_least(rows))
            for each, rows in zip((rest, asked), least, strict=True)
        ]
        if min(counts) >= fewest:
            return rest, asked
    return None


def _count_both(
    config: ExperimentConfig, data: Path, split: str, choice: TaskChoice, fewest: int
) -> tuple[int, int]:
    kept = _count(config, data, split, choice.at_least(fewest))
    return kept, _count(config, data, split, choice) - kept


def _count(config: ExperimentConfig, data: Path, split: str, choice: TaskChoice) -> int:
    found, folder, splits = 0, folder_of(config, split), Manifest.load(data).splits
    if folder not in splits:
        raise ConfigError(f"{data}: no split {folder!r}; it has {', '.join(splits)}")
    for shard in splits[folder].shards:
        index = GroupIndex.load(data / shard.name, check_shard=False, checksum=shard.index)
        groups = index.groups
        task, rows = (tf.constant(groups[name].copy()) for name in ("task", "rows"))
        found += int(tf.math.count_nonzero(choice.keeps(task, rows)))
    return found


def folder_of(config: ExperimentConfig, split: str) -> str:
    """Return the split of the data set that holds a split of the experiment."""
    return config.train_split if split == HELD_OUT else split


def training_choice(config: ExperimentConfig) -> TaskChoice:
    """Return which tasks of the training split are trained on: those that aren't held out."""
    if not config.held_out:
        return TaskChoice()
    return TaskChoice(
        config.held_out,
        config.held_out_part,
        config.held_out_by,
        held_out_rows=config.measured_rows or (1, 0),
    )


def measured_choice(config: ExperimentConfig, split: str) -> TaskChoice:
    """Return which tasks of a split's folder are measured as this split."""
    trains = folder_of(config, split) == config.train_split
    choice = training_choice(config) if trains else TaskChoice()
    fewest, most = config.measured_rows or (1, 0)
    return replace(choice, held_out=split == HELD_OUT, min_rows=fewest, max_rows=most)


def _columns(config: ExperimentConfig) -> dict[str, Any]:
    """Return the arguments of `gmeta.io.tasks` that name the columns to read."""
    columns: dict[str, Any] = {"query": config.query, "label": config.label}
    if config.own_columns:
        also = [config.item] if config.item else []
        columns["features"] = list(dict.fromkeys([*config.columns, *also]))
    return columns


_TASKS = 256  # per element
