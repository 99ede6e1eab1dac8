"""Batches of cut groups: tasks cut into support and query, and users into history and exposures.

`tasks` returns task batches for meta-learning (G-Meta, sections 2.1 and 2.2). `sequences` returns one record
for each user (MTGenRec, appendix A).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.io.cuts.sequence_split import LastOut, SequenceSplit, Unexposed
from gmeta.io.cuts.task_choice import TaskChoice
from gmeta.io.cuts.task_split import After, Flag, Query, Rows, TaskSplit, check_query, least_rows
from gmeta.io.readers.balance import Balance, bound_batch
from gmeta.io.readers.group_reader import groups, settle
from gmeta.io.readers.position import ReadingPosition
from gmeta.io.readers.prepared_split import choose_features, choose_label, choose_weight, open_split
from gmeta.io.readers.read_options import DEFAULTS, ReadOptions, Start, shares_of


def sequences(
    path: str | os.PathLike[str],
    *,
    history: Sequence[str] = (),
    targets: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    contexts: Sequence[str] = (),
    exposed: Query | LastOut | None = None,
    history_of: Flag | None = None,
    longest: int | None = None,
    unexposed: Unexposed = "leave_out",
    sequences_per_batch: int = 32,
    balance: Balance | None = None,
    min_rows: int = 1,
    start: Start = 0,
    options: ReadOptions = DEFAULTS,
) -> tf.data.Dataset:
    """Read batches of sequences of one split of a prepared data set; each iteration is one epoch.

    A sequence is one group of records, all rows of a user: ``gmeta prepare --task user --time timestamp``
    groups them in the order of time. (Omit ``--batch-rows``, which makes each batch a sequence.) Exposures,
    rows with what the user was shown and how the user responded, are the targets. The other rows are events
    and form the history. A model reads a user's history once for all exposures; samples with one exposure
    each would repeat it.

    Args:
      path: ``"<folder>/<split>"``, such as ``"data/train"``.
      history: Columns of the events, such as the item, the action and the time. A model that attends by time
        (`gmeta.ops.AttentionMask`) requires the time of the targets too: if exposures lie between events,
        only the time keeps a target from seeing later events.
      targets: Columns of the exposures that are known before the user responds.
      labels: Columns of the user's response, such as click and order; cast to float32. None: with
        ``targets``, the label that was passed to `gmeta prepare`, if any.
      contexts: Columns of the user, such as age or home town, with the value of the user's first row; other
        rows' values are ignored. The task's own column, the user's id, may be one of them.
      exposed: Which rows are exposures. None: no row is.

        - an int: this many of the latest rows, or all rows of a user with fewer;
        - a float above 0 and below 1: this share of the user's n rows, ``floor(exposed * n + 1/2)``, but at
          least one and, if n is above one, at most n - 1;
        - ``After("timestamp", t)``: the rows whose column is at least ``t``; with ``until=u``, rows from u on
          are not in the sequence;
        - ``Flag("is_exposure")``: the rows whose column isn't 0;
        - a part of leave-last-out. ``"test"``: the last row. ``"validation"``: the second to last row,
          without the last one. ``"train"``: no row, without the last two rows. A user with fewer than three
          rows is only in ``"train"``, with all rows. Rows with equal times keep the order of the data set,
          whereas ``gmeta train`` orders them by a hash.
      history_of: A flag that marks which of the other rows are events; rows that are neither exposures nor
        events are skipped. None: all other rows are events.
      longest: The maximum number of events of a history; the last events are kept. None: all.
      unexposed: How to treat a user without exposures by `After`, `Flag` or a part. Such a user adds nothing
        to the loss, but costs as much as others. ``"leave_out"`` makes the batch smaller, and counts the user
        in ``options.stats`` as ``"unexposed"``; ``"keep"`` keeps the user, without targets. A user without
        events is kept, without history.
      sequences_per_batch: Sequences ``B`` of a batch; the last batch of a range may have fewer.
      balance: Make batches of about equal cost instead. A sequence's tokens are its user's rows, at most
        ``longest`` unless ``balance`` sets its own limit. Skipped users count as well. With ``max_tokens``, a
        batch with more events and exposures raises an error; to count exposures in addition to ``longest``
        events, set ``balance.longest`` to their sum.
      min_rows: A user with fewer rows is bad data.
      start: Where reading begins, as for `gmeta.io.groups`.
      options: Order, rank, threads and bad data (`ReadOptions`).

    Returns:
      A dataset. An element is a dict of ``B`` sequences::

        {"task": (B,) int64,
         "contexts": {name: (B,), or RaggedTensor (B, None) of a list column},
         "history": {name: RaggedTensor (B, None), or (B, None, None) of a list column},
         "targets": {name: as the history's},
         "labels": {name: RaggedTensor (B, None) float32}}

      Columns of one part have the same row splits. ``row_lengths()`` of any of ``labels`` is each user's
      number of samples, and their sum is the batch's weight in a mean over ranks. ``B`` may be 0. The
      dataset's cardinality is that of `gmeta.io.groups`.

    Raises:
      ConfigError: An argument is invalid, or names a split or column that doesn't exist.
      DataError: There is no manifest, or it doesn't match its shards.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating, as for `gmeta.io.groups`.

    Example:
      >>> train = sequences(
      ...     "data/train", history=["item", "action", "timestamp"], targets=["item", "timestamp"],
      ...     labels=["click", "order"], contexts=["age"], exposed=Flag("is_exposure"), longest=3000,
      ...     balance=Balance(5e11, SequenceCost.of_hstu(dim=512)),
      ... )
      >>> model.fit(train, epochs=2)
      >>> cut = functools.partial(sequences, "data/train", history=["item", "timestamp"], targets=["item"])
      >>> train, validation, test = (cut(exposed=part) for part in ("train", "validation", "test"))

    References:
      MTGenRec, section 3.4 and appendix A.
    """
    opened = open_split(path, options.on_bad)
    if labels is None:
        labels = (opened.roles.label,) if targets and opened.roles.label else ()
    split = SequenceSplit(
        contexts=contexts,
        history=history,
        targets=targets,
        labels=labels,
        exposed=exposed,
        history_of=history_of,
        longest=longest,
        unexposed=unexposed,
        path=os.fspath(path),
        stats=options.stats,
    ).fit_to(opened.schema)
    if balance is not None and balance.longest is None and balance.tokens is None:
        balance = replace(balance, longest=longest)
    elements = groups(
        path,
        groups_per_element=whole_number("sequences: sequences_per_batch", sequences_per_batch, least=1),
        balance=balance,
        min_rows=min_rows,
        start=start,
        options=options,
    )
    steps: list[Callable[..., Any]] = [split]
    if balance is not None and balance.max_tokens is not None:
        most = balance.max_tokens * shares_of(options.shard, start).count
        steps.append(partial(bound_batch, max_tokens=most, path=os.fspath(path)))
    return finish(elements, steps, start)


def finish(elements: tf.data.Dataset, steps: Sequence[Callable[..., Any]], start: Start) -> tf.data.Dataset:
    """Return the dataset of batches made from elements of groups by these steps, each in parallel."""
    batches = elements
    for step in steps:
        batches = batches.map(step, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    batches = batches.prefetch(tf.data.AUTOTUNE)
    return settle(start.count(batches) if isinstance(start, ReadingPosition) else batches)


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
    ``resample`` choose the rows: the latest, rows drawn once, or rows redrawn in each epoch.

    An epoch's order is a pure function of (``seed``, epoch number), and ranks read contiguous ranges of it
    (`gmeta.io.groups`). The dataset counts its epochs: the first iteration is epoch ``start``, and each
    iteration that reads at least one element adds one, even if it reads only the first element. To resume
    training after ``e`` epochs, build the dataset with ``start=e``. To resume inside an epoch, save its
    iterator in a ``tf.train.Checkpoint``, or start at an `EpochPlan`, on any number of ranks.

    Args:
      path: ``"<folder>/<split>"``, such as ``"data/warm"``: the folder that `gmeta prepare` wrote and one of
        the splits in its manifest.
      tasks_per_batch: Tasks ``T`` in an element; the last element of a rank's range may have fewer.
      query: The query set of each task; all its other rows are support rows.

        - an int: this many rows;
        - a float above 0 and below 1: this share of the task's n rows, ``floor(query * n + 1/2)``, but at
          least one and at most n - 1;
        - ``After("timestamp", t)``: the rows whose column is at least ``t``;
        - ``Flag("is_query")``: the rows whose column isn't 0.

        A task without a row for each side is too small to split.
      support: The maximum number of rows of a support set; the last rows are kept. None: all rows outside the
        query set.
      rows: ``"latest"``: the query set is the task's last rows, the support set those before it.
        ``"random"``: both are drawn. None: ``"random"`` with ``resample``, ``"latest"`` without. With `After`
        and `Flag`, which name the rows themselves, support and query keep the task's order.
      resample: Redraw rows in each epoch, as a pure function of (seed, epoch, task, batch). False: drawn rows
        are the same in each epoch, a pure function of (seed, task, batch).
      label: The column to predict, or several columns; cast to float32. None: the label that was passed to
        `gmeta prepare`, otherwise ``label`` or ``rating``.
      weight: A float32 column of row weights, which replace the ones in the masks.
      features: The columns to return, of int64 or float32; they may include the task's column. None: all
        columns except the task, the batch, the time, the labels, the weight and the column that ``query``
        names. The time is the column that was passed to `gmeta prepare`
        (`gmeta.core.data_manifest.Manifest.roles`).
      pad_value: None: list columns are ragged. A number: list columns are dense, padded with this number to
        the longest list of the element.
      only: Which tasks are read. Tasks that it skips make their element smaller, or empty. It also skips
        tasks that are too small to split, which then don't count as bad records. None: all tasks.
      balance: Make elements of about equal cost instead. A task's tokens are its rows, support and query.
      start: Where reading begins, as for `gmeta.io.groups`.
      options: Order, rank, threads and bad data (`ReadOptions`). A task that is too small to split, or has no
        row on one side, is bad data; if it is skipped, its element is smaller. All ranks have the same number
        of elements, except with ``balance``: if a rank's range has one group fewer, its last element may have
        no task. The dataset's options mark it as sharded (auto-sharding OFF), so `fit` doesn't shard it
        again.

    Returns:
      A dataset. An element is a dict of ``T`` tasks with ``N`` rows in total; ``S`` is the size of the
      largest support set among them, and ``Q`` that of the largest query set::

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
