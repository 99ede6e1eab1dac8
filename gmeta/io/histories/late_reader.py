"""Batches of sequences whose histories are read from a store when they are needed (late materialization)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.io.cuts.sequence_split import SequenceSplit
from gmeta.io.histories.history_plan import HistoryPlan
from gmeta.io.histories.store import HistoryStore
from gmeta.io.readers.group_reader import groups
from gmeta.io.readers.prepared_split import open_split
from gmeta.io.readers.read_options import DEFAULTS, ReadOptions, Start
from gmeta.io.readers.sequence_reader import finish

_ALL_ROWS = 2**31 - 1


def late(
    examples: str | os.PathLike[str],
    store: HistoryStore,
    *,
    history: Sequence[str],
    targets: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    contexts: Sequence[str] = (),
    generation: str | None = None,
    tail: Mapping[str, str] | None = None,
    longest: int | None = None,
    sequences_per_batch: int = 32,
    min_rows: int = 1,
    start: Start = 0,
    options: ReadOptions = DEFAULTS,
) -> tf.data.Dataset:
    """Read batches of sequences as `gmeta.io.sequences` gives them, with histories out of a store.

    The examples are a prepared data set of exposures alone: ``gmeta prepare --task user --time timestamp`` on
    what users were shown, in the store's unit of time. With ``--batch-rows 1`` each exposure is an example,
    without it all exposures of a user are. An example's history are the newest `longest` events before its
    last exposure. A model that attends by time (`gmeta.ops.AttentionMask`) keeps earlier exposures from
    seeing later events.

    With ``generation`` a history is that of the generation which the ranker read, so events that arrived
    later aren't in it. Events that the ranker had and that generation hadn't are the ``tail``, which the
    example carries. Both together give what the ranker saw, from any later generation of the store.

    Args:
      examples: ``"<folder>/<split>"`` of the prepared data set; its task is the user.
      store: The store.
      history: Columns of events, of one group of the store, or the store's time.
      targets: As for `gmeta.io.sequences`.
      labels: As for `gmeta.io.sequences`.
      contexts: As for `gmeta.io.sequences`.
      generation: The examples' column with the number of the generation that the ranker read. None: events
        of every generation up to the store's own count.
      tail: Column of `history` -> the examples' list column with the values of the tail's events. All of
        `history` and the store's time must be there. Events are ordered by time, those of the store first.
      longest: Most events of a history, the tail's included; the newest are kept. None: all.
      sequences_per_batch: As for `gmeta.io.sequences`.
      min_rows: As for `gmeta.io.sequences`.
      start: As for `gmeta.io.sequences`.
      options: As for `gmeta.io.sequences`. With ``on_bad="skip"`` the history of a damaged stripe is empty.

    Returns:
      A dataset whose elements, cardinality and saved states are those of `gmeta.io.sequences`.

    Raises:
      ConfigError: A column isn't there, in the examples or in the store, or an argument is out of range.
      DataError: There is no manifest, or it doesn't match its shards.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating, as for `gmeta.io.groups` and
        `HistoryStore.read`.

    Example:
      >>> train = late(
      ...     "exposures/train", HistoryStore("histories"), history=["item", "action", "timestamp"],
      ...     targets=["item", "timestamp"], labels=["click"],
      ...     contexts=["age"], longest=1000,
      ... )
      >>> model.fit(train)

    References:
      Versioned Late Materialization, section 3.3.
    """
    opened = open_split(examples, options.on_bad)
    time = opened.roles.time
    if time is None:
        raise ConfigError(f"late: {os.fspath(examples)} was prepared without a time: prepare it with --time")
    if labels is None:
        labels = (opened.roles.label,) if targets and opened.roles.label else ()
    plan = HistoryPlan(store, history, time, generation, dict(tail or {}), longest, targets, options.on_bad)
    split = SequenceSplit(
        contexts=contexts,
        targets=[*targets, *(name for name in plan.needed if name not in targets)],
        labels=labels,
        exposed=_ALL_ROWS,
        path=os.fspath(examples),
        stats=options.stats,
    ).fit_to(opened.schema)
    plan.check(opened.schema)
    elements = groups(
        examples,
        groups_per_element=whole_number("late: sequences_per_batch", sequences_per_batch, least=1),
        min_rows=min_rows,
        start=start,
        options=options,
    )
    return finish(elements, [split, plan], start)
