"""Task batches for meta-learning: groups cut into support and query (G-Meta, sections 2.1 and 2.2)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.io.cuts.task_choice import TaskChoice
from gmeta.io.cuts.task_split import After, Flag, Query, Rows, TaskSplit, check_query, least_rows
from gmeta.io.readers.balance import Balance
from gmeta.io.readers.group_reader import groups, settle
from gmeta.io.readers.position import ReadingPosition
from gmeta.io.readers.prepared_split import choose_features, choose_label, choose_weight, open_split
from gmeta.io.readers.read_options import DEFAULTS, ReadOptions, Start


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
    balance: Balance | None = None,
    start: Start = 0,
    options: ReadOptions = DEFAULTS,
) -> tf.data.Dataset:
    """Read task batches of one split of a prepared data set; each iteration is one epoch.

    A task is one group of records: all rows with one value of the column that `gmeta prepare --task` named,
    such as a user, an item, an advertiser or a scenario. ``query`` defines the query set, by a number of rows
    or by the rows themselves; the other rows are the support set. If ``query`` is a number, ``rows`` and
    ``resample`` choose the rows: the latest, rows drawn once, or rows drawn again in each epoch.

    An epoch's order is a pure function of (``seed``, epoch number), and ranks read contiguous ranges of it
    (`gmeta.io.groups`). The dataset counts its epochs: the first iteration is epoch ``start``, and each
    iteration that reads at least one element adds one, even if it reads the first element only. To resume
    training after ``e`` epochs, build the dataset with ``start=e``. To resume inside an epoch, save its
    iterator in a ``tf.train.Checkpoint``, or start at an `EpochPlan`, on any number of ranks.

    Args:
      path: ``"<folder>/<split>"``, such as ``"data/warm"``: the folder that `gmeta prepare` wrote and one of
        the splits in its manifest.
      tasks_per_batch: Tasks ``T`` in an element; the last element of a rank's range may hold fewer.
      query: The query set of each task; all its other rows are support rows.

        - an int: this many rows;
        - a float above 0 and below 1: this share of the task's n rows, ``floor(query * n + 1/2)``, but at
          least one and at most n - 1;
        - ``After("timestamp", t)``: the rows whose column is at least ``t``;
        - ``Flag("is_query")``: the rows whose column isn't 0.

        A task needs a row on each side, or it is too small to split.
      support: The most rows of a support set; its last rows are kept. None: all rows outside the query set.
      rows: ``"latest"``: the query set is the task's last rows, the support set those before it.
        ``"random"``: both are drawn. None: ``"random"`` with ``resample``, ``"latest"`` without. With `After`
        and `Flag`, which name the rows themselves, support and query keep the task's order.
      resample: Draw again in each epoch, a pure function of (seed, epoch, task, batch). False: rows that are
        drawn are the same in each epoch, a pure function of (seed, task, batch).
      label: The column to predict, or several of them; cast to float32. None: the label that was given to
        `gmeta prepare`, or else ``label`` or ``rating``.
      weight: A float32 column of row weights, which replace the ones in the masks.
      features: The columns to return, of int64 or float32; they may include the task's column. None: all
        columns except the task, the batch, the time, the labels, the weight and the column that ``query``
        names. The time is the column that was given to `gmeta prepare`
        (`gmeta.core.data_manifest.Manifest.roles`).
      pad_value: None: list columns are ragged. A number: list columns are dense, padded with this number to
        the longest list of the element.
      only: Which tasks are read. Tasks that it leaves out make their element smaller, or empty. It also
        leaves out tasks that are too small to split, which then don't count as bad records. None: all tasks.
      balance: Make elements of about equal cost instead. A task's tokens are its rows, support and query.
      start: Where reading begins, as for `gmeta.io.groups`.
      options: Order, rank, threads and bad data (`ReadOptions`). A task that is too small to split, or has no
        row on one side, is bad data; if it is skipped, its element is smaller. All ranks have the same number
        of elements, except with ``balance``: if a rank's range has one group less, its last element may hold
        no task. The dataset's options say that it is sharded (auto-sharding OFF), so `fit` doesn't shard it
        again.

    Returns:
      A dataset. An element is a dict of ``T`` tasks with ``N`` rows in all; ``S`` is the size of the largest
      support set among them, and ``Q`` that of the largest query set::

        {"features": {name: (N,) tensor, or RaggedTensor (N, None) for a list column},
         "label": (N,) float32, or (N, labels) where ``label`` is a sequence, "task": (T,) int64,
         "support": {"index": (T, S) int64, "mask": (T, S) float32},
         "query": {"index": (T, Q) int64, "mask": (T, Q) float32}}

      ``index`` addresses rows of ``features`` and ``label``: ``tf.gather(label, support["index"])`` is
      (T, S). Padding has index 0 and mask 0. The dataset's cardinality is known,
      ``ceil(ceil(groups / N) / tasks_per_batch)``, for a start at an epoch's number or a position.

    Raises:
      ConfigError: An argument is invalid, or names a split or column that doesn't exist.
      DataError: There is no manifest, or it doesn't match its shards.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating, as for `gmeta.io.groups`.

    Example:
      >>> warm = tasks("data/warm", tasks_per_batch=32, query=10)
      >>> model.fit(warm, epochs=20)
      >>> resampled = tasks("data/warm", query=0.2, resample=True)  # a fifth of each task, redrawn each epoch
    """
    tasks_per_batch = whole_number("tasks: tasks_per_batch", tasks_per_batch, least=1)
    support = None if support is None else whole_number("tasks: support", support, least=1)
    opened = open_split(path, options.on_bad)
    schema, roles = opened.schema, opened.roles
    query = check_query(query, schema)
    if isinstance(query, After) and query.until is not None:
        raise ConfigError(f"tasks: query={query}: until is for gmeta.io.sequences, leave it out")
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
        seed=options.seed,
        skip=options.on_bad == "skip",
        stats=options.stats,
    )
    elements = groups(
        path,
        groups_per_element=tasks_per_batch,
        balance=balance,
        min_rows=least_rows(query) if only is None else 1,
        start=start,
        options=options,
    )
    if only is not None:
        elements = elements.map(only.at_least(least_rows(query)), num_parallel_calls=tf.data.AUTOTUNE)
    batches = elements.map(split, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    batches = batches.prefetch(tf.data.AUTOTUNE)
    return settle(start.count(batches) if isinstance(start, ReadingPosition) else batches)
