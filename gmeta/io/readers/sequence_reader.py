"""Batches of sequences: one record for each user, with history and exposures (MTGenRec, appendix A)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from gmeta.core.errors import whole_number
from gmeta.io.cuts.sequence_split import LastOut, SequenceSplit, Unexposed
from gmeta.io.cuts.task_split import Flag, Query
from gmeta.io.readers.balance import Balance, bound_batch
from gmeta.io.readers.group_reader import groups, settle
from gmeta.io.readers.position import ReadingPosition
from gmeta.io.readers.prepared_split import open_split
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
    groups them in the order of time. (Leave out ``--batch-rows``, which makes each batch a sequence.) Rows
    that are exposures, what the user was shown and how the user responded, are the targets. The other rows
    are events and form the history. A model reads a user's history once for all exposures; samples of one
    exposure each would repeat it.

    Args:
      path: ``"<folder>/<split>"``, such as ``"data/train"``.
      history: Columns of the events, such as the item, the action and the time. A model that attends by time
        (`gmeta.ops.AttentionMask`) needs the time of the targets too: if exposures lie between events, only
        the time keeps a target from seeing what came after it.
      targets: Columns of the exposures that are known before the user responds.
      labels: Columns of the user's response, such as click and order; cast to float32. None: if ``targets``
        are named, the label that was given to `gmeta prepare`, if there is one.
      contexts: Columns of the user, such as age or home town, with the value of the user's first row; other
        rows' values are ignored. The task's own column, the user's id, may be one of them.
      exposed: Which rows are exposures. None: no row is.

        - an int: this many of the latest rows; all rows of a user who has no more;
        - a float above 0 and below 1: this share of the user's n rows, ``floor(exposed * n + 1/2)``, but at
          least one and, if n is above one, at most n - 1;
        - ``After("timestamp", t)``: the rows whose column is at least ``t``; with ``until=u``, those from u
          on are left out of the sequence;
        - ``Flag("is_exposure")``: the rows whose column isn't 0;
        - a part of leave-last-out. ``"test"``: the last row. ``"validation"``: the last but one; the last row
          is left out. ``"train"``: no row; the last two rows are left out. A user with fewer than three rows
          is in ``"train"`` alone, with all rows. Rows of equal times keep the order of the data set, where
          ``gmeta train`` puts them into an order by a hash.
      history_of: A flag that marks which of the other rows are events; rows that are neither exposures nor
        events are left out. None: all other rows are events.
      longest: The most events of a history; its last events are kept. None: all.
      unexposed: What to do with a user who has no exposure by `After`, `Flag` or a part. Such a user gives
        nothing to learn from, but costs as much as others. ``"leave_out"`` makes the batch smaller, and
        counts the user in ``options.stats`` as ``"unexposed"``; ``"keep"`` keeps the user, with no targets. A
        user without events is kept, with no history.
      sequences_per_batch: Sequences ``B`` of a batch; the last batch of a range may hold fewer.
      balance: Make batches of about equal cost instead. A sequence's tokens are its user's rows, at most
        ``longest`` unless ``balance`` sets its own limit. Users who are left out count as well. With
        ``max_tokens``, a batch of more events and exposures is an error; so that exposures besides
        ``longest`` events count, set ``balance.longest`` to both together.
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
    """Return the dataset of batches that elements of groups become by these steps, each in parallel."""
    batches = elements
    for step in steps:
        batches = batches.map(step, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    batches = batches.prefetch(tf.data.AUTOTUNE)
    return settle(start.count(batches) if isinstance(start, ReadingPosition) else batches)
