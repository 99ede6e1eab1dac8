"""Batches of sequences whose histories are read from a store when they are needed (late materialization)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.io.cuts.sequence_split import SequenceSplit
from gmeta.io.histories.exposure_windows import ExposureWindows
from gmeta.io.histories.history_plan import HistoryPlan
from gmeta.io.histories.logged_check import CRC_COLUMN, LENGTH_COLUMN, Check, LoggedCheck, need_numbers
from gmeta.io.histories.store import HistoryStore
from gmeta.io.readers.group_reader import groups
from gmeta.io.readers.prepared_split import open_split
from gmeta.io.readers.read_options import DEFAULTS, ReadOptions, Start
from gmeta.io.readers.sequence_reader import finish
from gmeta.io.readers.step_balance import Balance

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
    window: int | None = None,
    check: Check | None = None,
    check_column: str | None = None,
    share: Literal["window"] | None = None,
    within: int | None = None,
    sequences_per_batch: int = 32,
    balance: Balance | None = None,
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

    Examples of users whose events `gmeta history scrub` has deleted since are left out, and counted in
    ``options.stats`` as ``"deleted"``. Without ``generation`` these are all examples of users who were ever
    deleted, also of those who came back.

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
      window: Only events of so long before the example's last exposure count, in the unit of time, so an
        event of time e is in the history of an exposure at t if t - window <= e < t. None: all.
      check: Compares each history, the tail included, with what the ranker logged beside the example's last
        exposure: with ``"length"`` its number of events, of which at most `longest` count; with ``"crc"`` its
        checksum, that of `history_crc` over the columns of `history` in this order. A history that differs
        ends the reading; with ``on_bad="skip"`` the example is left out, and counted in ``options.stats`` as
        ``"other_history"``.
      check_column: The examples' int64 column with that number. None: ``"history_length"`` or
        ``"history_crc"``.
      share: With ``"window"`` a user's exposures become a sequence for each window: a window begins at an
        exposure, and has those that follow in less than `within`. It has the history before its last
        exposure, and `contexts` of its first. With a generation, or a tail, an exposure that knew of events
        which had happened, but hadn't arrived, at the exposure before begins a new window. Prepare such
        examples without ``--batch-rows``. A batch then has the windows of ``sequences_per_batch`` users.
      within: The length of a window, in the unit of time.
      sequences_per_batch: As for `gmeta.io.sequences`.
      balance: Make batches of about equal cost instead. A sequence's tokens are the events of its history,
        which ``"history_length"`` or the column ``balance.tokens`` says in the last exposure, and its
        exposures. At most `longest` events count, unless ``balance`` sets its own limit. Not with `share`.
      min_rows: As for `gmeta.io.sequences`.
      start: As for `gmeta.io.sequences`.
      options: As for `gmeta.io.sequences`. With ``on_bad="skip"`` the history of a damaged stripe is empty,
        unless `check` leaves the example out. ``options.stats`` counts the histories, and what was read.

    Returns:
      A dataset whose elements, cardinality and saved states are those of `gmeta.io.sequences`.

    Raises:
      ConfigError: A column isn't there, in the examples or in the store, or an argument is out of range.
      DataError: There is no manifest, or it doesn't match its shards.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating, as for `gmeta.io.groups` and
        `HistoryStore.read`; a history isn't what the ranker saw.

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
    tail, where, bad = dict(tail or {}), os.fspath(examples), (options.on_bad, options.stats)
    if check is None and check_column is not None:
        raise ConfigError(f"late: check_column={check_column!r} needs check='crc' or check='length'")
    column = check_column or (CRC_COLUMN if check == "crc" else LENGTH_COLUMN)
    compared = None if check is None else LoggedCheck(check, column, longest, where, store.path, *bad)
    plan = HistoryPlan(store, history, time, generation, tail, longest, window, targets, *bad, compared)
    plan.fit_to(opened.schema)
    split = SequenceSplit(
        contexts=contexts,
        targets=[*targets, *(name for name in plan.needed if name not in targets)],
        labels=labels,
        exposed=_ALL_ROWS,
        path=where,
        stats=options.stats,
    ).fit_to(opened.schema)
    steps: list[Callable[..., Any]] = [split, plan]
    if share is not None or within is not None:
        if share != "window" or within is None:
            raise ConfigError(f"late: share='window' and within go together, got {share!r} and {within!r}")
        if balance is not None:
            raise ConfigError("late: balance counts a user as one sequence; leave out share='window', or it")
        windows = ExposureWindows(time, within, generation, tail, store.time)
        windows.check(opened.schema)
        steps.insert(0, windows)
    if balance is not None:
        tokens = balance.tokens or LENGTH_COLUMN
        need_numbers(opened.schema, tokens, f"balance needs {tokens!r}")
        balance = replace(balance, tokens=tokens, longest=balance.longest or longest)
    elements = groups(
        examples,
        groups_per_element=whole_number("late: sequences_per_batch", sequences_per_batch, least=1),
        balance=balance,
        min_rows=min_rows,
        start=start,
        options=options,
    )
    return finish(elements, steps, start)
