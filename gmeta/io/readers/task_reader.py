"""Task batches for meta-learning: groups cut into support and query (G-Meta, sections 2.1 and 2.2)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.data.on_bad import OnBad
from gmeta.io.cuts.query_rule import After, Flag, Query, check_query, least_rows
from gmeta.io.cuts.task_choice import TaskChoice
from gmeta.io.cuts.task_split import Rows, TaskSplit
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.column_choice import choose_features, choose_label, choose_weight
from gmeta.io.readers.epoch import EpochPlan
from gmeta.io.readers.group_reader import groups, settle
from gmeta.io.readers.position import ReadingPosition
from gmeta.io.readers.prepared_split import open_split


def tasks(
    path: str | os.PathLike[str],
    *,
    tasks_per_batch: int = 32,
    query: Query = 10,
    support: int | None = None,
    rows: Rows | None = None,
    resample: bool = False,
    label: str | Sequence[str] | None = None,
    weight: str | None = None,
    features: Sequence[str] | None = None,
    pad_value: int | None = None,
    only: TaskChoice | None = None,
    shuffle: bool = True,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    first_epoch: int = 0,
    count_epochs: bool = True,
    pieces: int = 1,
    position: ReadingPosition | None = None,
    resume: EpochPlan | None = None,
    passed: Sequence[tuple[int, int]] = (),
    shard: tuple[int, int] | None = None,
    threads: int | None = None,
    on_bad: OnBad = "raise",
    stats: ReaderStats | None = None,
) -> tf.data.Dataset:
    """Task batches of one split of a prepared data set; each iteration is one epoch.

    A task is one group of records: all rows of a user, an item, an advertiser, a scenario, of whatever column
    `gmeta prepare --task` named. ``query`` says how many of its rows, or which, are the query set; the others
    are the support set. Where it gives a number, ``rows`` and ``resample`` say which ones: the latest, ones
    drawn once, or ones drawn anew in each epoch.

    An epoch's order is a pure function of (``seed``, epoch number), and ranks read contiguous ranges of it
    (`gmeta.io.groups`). The number is counted by the dataset: the first iteration is epoch ``first_epoch``,
    and each iteration that reads at least one element, a look at the first one included, adds one. To resume
    training after ``e`` epochs, build the dataset with ``first_epoch=e``; to resume inside one, save its
    iterator in a ``tf.train.Checkpoint``, or pass ``resume``, with any number of ranks.

    Args:
      path: ``"<folder>/<split>"``, such as ``"data/warm"``: the folder that `gmeta prepare` wrote and one of
        the splits in its manifest.
      tasks_per_batch: Tasks ``T`` in an element; the last element of a rank's range may hold fewer.
      query: The query set of each task; all its other rows are support rows.

        - an int: so many rows;
        - a float above 0 and below 1: that share of the task's n rows, ``floor(query * n + 1/2)``, but at
          least one and at most n - 1;
        - ``After("timestamp", t)``: the rows whose column is at least ``t``;
        - ``Flag("is_query")``: the rows whose column isn't 0.

        A task needs a row on each side, or it is too small to split.
      support: The most rows of a support set, of which the last ones stay. None: all that aren't the query's.
      rows: ``"latest"``: the query set is the task's last rows, the support set those before it.
        ``"random"``: both are drawn. None: ``"random"`` with ``resample``, ``"latest"`` without. `After` and
        `Flag` name the rows themselves; support and query keep the task's order then.
      resample: Draw anew in each epoch, a pure function of (seed, epoch, task, batch). False: rows that are
        drawn are the same in each epoch, a pure function of (seed, task, batch).
      label: The column to predict, or several of them; cast to float32. None: the one that `gmeta prepare`
        was told of, or else ``label`` or ``rating``.
      weight: A column of float32 to weigh rows by: it stands in the masks in place of ones.
      features: The columns to hand on, of int64 or float32, the task's column among them if you like. None:
        all columns but the task, the batch, the time, the labels, the weight and what ``query`` names; which
        one is the time, `gmeta prepare` was told (`gmeta.core.data.manifest.Manifest.roles`).
      pad_value: None: list columns are ragged. A number: they are dense, filled up with it to the longest
        list of the element.
      only: Which tasks are read. Those that it passes over leave their element smaller, or empty, and tasks
        that are too small to split are among them, no bad records. None: all tasks.
      shuffle: Whether the order changes with the epoch, or is the shards'.
      shuffle_buffer: Groups that are permuted among each other; the order is uniform if it holds all of them.
        None: as many as fill 64 MiB.
      seed: Gives the orders.
      first_epoch: The number of the first iteration.
      count_epochs: False: each iteration is epoch ``first_epoch``, and the dataset has no state outside of
        its iterators, as tf.data service needs.
      pieces: As for `gmeta.io.groups`, for tf.data service.
      position: Where this dataset begins and stands, in variables that a checkpoint of the model can hold;
        in place of ``first_epoch``.
      resume: What is left of the first epoch (`gmeta.io.epoch_plan`).
      passed: Steps of the first epoch that were taken before: (ranks, steps) for each number of ranks in
        turn.
      shard: (r, N): this is rank r of N ranks, and reads the r-th of N contiguous ranges of the epoch's
        order. Give all ranks the same ``seed``. None: the rank that this process is (``gmeta.init()``); in an
        elastic job that has lost ranks, an element has the tasks that those would have had as well
        (`gmeta.core.shares`). All ranks have the same number of elements; where a range has one
        group less, a last element may hold no task. The data set says in its options that it is sharded
        (auto-sharding OFF), and `fit` shards it no further.
      threads: Threads that parse. None: as many as there are cores, at most 4.
      on_bad: ``"raise"`` or ``"skip"``, as for `gmeta.io.groups`; a task that is too small to split, or has
        no row on one side, is bad too. A skipped task leaves its element smaller.
      stats: Counters to count into; they name what was skipped.

    Returns:
      A dataset. An element is a dict, with ``N`` rows in its ``T`` tasks, ``S`` the longest support set among
      them and ``Q`` the longest query set::

        {"features": {name: (N,) tensor, or RaggedTensor (N, None) for a list column},
         "label": (N,) float32, or (N, labels) where ``label`` is a sequence, "task": (T,) int64,
         "support": {"index": (T, S) int64, "mask": (T, S) float32},
         "query": {"index": (T, Q) int64, "mask": (T, Q) float32}}

      ``index`` addresses rows of ``features`` and ``label``: ``tf.gather(label, support["index"])`` is
      (T, S). Padding has index 0 and mask 0. The dataset's cardinality is known,
      ``ceil(ceil(groups / N) / tasks_per_batch)``, unless ``resume`` or ``pieces`` is given.

    Raises:
      ConfigError: An argument makes no sense, or names a split or column that isn't there.
      DataError: No manifest, or one that doesn't match its shards.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating, as for `gmeta.io.groups`.

    Example:
      >>> warm = tasks("data/warm", tasks_per_batch=32, query=10)
      >>> model.fit(warm, epochs=20)
      >>> resampled = tasks("data/warm", query=0.2, resample=True)  # a fifth of each task, anew each epoch
    """
    tasks_per_batch = whole_number("tasks: tasks_per_batch", tasks_per_batch, least=1)
    support = None if support is None else whole_number("tasks: support", support, least=1)
    opened = open_split(path, on_bad)
    schema, roles = opened.schema, opened.roles
    query = check_query(query, schema)
    label = choose_label("tasks", schema, roles, label)
    weight = choose_weight("tasks", schema, weight)
    labels = (label,) if isinstance(label, str) else label
    asked = (query.column,) if isinstance(query, After | Flag) else ()
    kept_back = (schema.task, roles.time, weight, *labels, *asked)
    split = TaskSplit(
        path=os.fspath(path),
        schema=schema,
        features=choose_features("tasks", schema, features, kept_back),
        label=label,
        weight=weight,
        query=query,
        support=support,
        rows=rows,
        resample=resample,
        pad_value=pad_value,
        seed=seed,
        skip=on_bad == "skip",
        stats=stats,
    )
    elements = groups(
        path,
        groups_per_element=tasks_per_batch,
        shuffle=shuffle,
        shuffle_buffer=shuffle_buffer,
        seed=seed,
        first_epoch=first_epoch,
        count_epochs=count_epochs,
        pieces=pieces,
        position=position,
        resume=resume,
        passed=passed,
        shard=shard,
        min_rows=least_rows(query) if only is None else 1,
        threads=threads,
        on_bad=on_bad,
        stats=stats,
    )
    if only is not None:
        elements = elements.map(only.at_least(least_rows(query)), num_parallel_calls=tf.data.AUTOTUNE)
    batches = elements.map(split, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    batches = batches.prefetch(tf.data.AUTOTUNE)
    return settle(batches if position is None else position.counted(batches))
