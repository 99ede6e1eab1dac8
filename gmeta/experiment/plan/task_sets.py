"""The tasks that an experiment trains on and measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta import io
from gmeta.core.data.group_index import GroupIndex
from gmeta.core.data.manifest import Manifest
from gmeta.core.data.on_bad import OnBad
from gmeta.experiment.plan.experiment_config import HELD_OUT, ExperimentConfig
from gmeta.io.cuts.query_rule import least_rows

DEFAULTS = io.ReadOptions()


def training_tasks(
    config: ExperimentConfig,
    data: Path,
    start: io.Start = 0,
    options: io.ReadOptions = DEFAULTS,
    query: int | float | None = None,
) -> tf.data.Dataset:
    """Read the tasks of the training split, in a new order each epoch.

    Args:
      config: The experiment.
      data: A prepared data set.
      start: As for `gmeta.io.tasks`.
      options: As for `gmeta.io.tasks`; ``seed`` sets the order of tasks and the random draws.
      query: The query set, if it isn't the experiment's; the tasks are the same.
    """
    choice = choice_of(config, config.train_split)
    return io.tasks(
        data / config.train_split,
        tasks_per_batch=config.tasks_per_batch,
        rows=None if config.resample else config.rows,
        resample=config.resample,
        **{**_columns(config), **({} if query is None else {"query": query})},
        only=choice if choice is None else choice.at_least(least_rows(config.query)),
        start=start,
        options=options,
    )


def measured_tasks(
    config: ExperimentConfig,
    data: Path,
    split: str,
    on_bad: OnBad = "raise",
    stats: io.ReaderStats | None = None,
    shard: tuple[int, int] | None = None,
) -> tf.data.Dataset:
    """Read the tasks of a split in the order of the files: the rank's part, or the part that ``shard`` names.

    Random draws depend on the task alone, not on the method or its seed.
    """
    return io.tasks(
        data / folder_of(config, split),
        tasks_per_batch=config.tasks_per_batch,
        rows=config.rows,
        **_columns(config),
        only=choice_of(config, split),
        options=io.ReadOptions(shuffle=False, on_bad=on_bad, stats=stats, shard=shard),
    )


def count_tasks(config: ExperimentConfig, data: Path, split: str) -> tuple[int, int]:
    """Count the tasks of a split that the experiment uses, and those that are too small for a query set."""
    shards = Manifest.load(data).splits[folder_of(config, split)].shards
    choice = choice_of(config, split)
    if choice is None:
        return sum(shard.groups for shard in shards), 0
    own = small = 0
    for shard in shards:
        groups = GroupIndex.load(data / shard.name).groups
        task, rows = (tf.constant(groups[name].copy()) for name in ("task", "rows"))
        whole = int(tf.math.count_nonzero(choice.keeps(task, rows + 2**40)))
        kept = int(tf.math.count_nonzero(choice.at_least(least_rows(config.query)).keeps(task, rows)))
        own, small = own + kept, small + whole - kept
    return own, small


def folder_of(config: ExperimentConfig, split: str) -> str:
    """Return the split of the data set that holds a split of the experiment."""
    return config.train_split if split == HELD_OUT else split


def choice_of(config: ExperimentConfig, split: str) -> io.TaskChoice | None:
    """Return which tasks of its folder belong to a split; None: all."""
    if not config.own_columns:
        return None  # MovieLens' tasks have enough rows, and the measured tasks have a split of their own
    parts = config.held_out if folder_of(config, split) == config.train_split else 0
    return io.TaskChoice(max(parts, 1), held_out=split == HELD_OUT)


def _columns(config: ExperimentConfig) -> dict[str, Any]:
    """Return the arguments of `gmeta.io.tasks` that name the columns to read."""
    columns: dict[str, Any] = {"query": config.query, "label": config.label}
    if config.own_columns:
        also = [config.item] if config.item else []
        columns["features"] = list(dict.fromkeys([*config.columns, *also]))
    return columns
