"""Batches of sequences whose histories are read from a store on demand (late materialization)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.schema import Schema
from gmeta.io.cuts.sequence_split import SequenceSplit
from gmeta.io.histories.history_plan import (
    CRC_COLUMN,
    LENGTH_COLUMN,
    Check,
    HistoryPlan,
    LoggedCheck,
    need_numbers,
)
from gmeta.io.histories.store import HistoryStore
from gmeta.io.readers.balance import Balance
from gmeta.io.readers.cut_reader import finish
from gmeta.io.readers.group_reader import groups
from gmeta.io.readers.prepared_split import open_split
from gmeta.io.readers.read_options import DEFAULTS, ReadOptions, Start
from gmeta.io.streams.event_stream import Stream
from gmeta.io.streams.position import StreamPosition

# Cuts a user's exposures into windows of nearby times that share one history.
#
# A window starts at an exposure and contains the user's exposures that follow within a given time. Its
# history is that of its last exposure; a model that attends by time hides later events from earlier
# exposures. This can't hide events that happened before an exposure but arrived after it. A new window
# therefore starts where the generation changes, or where a tail has an event that the previous exposure's
# tail should also have.
#
# For a window that starts at row i, next(i) is the first row of the following window. The windows' first rows
# are those that repeated next reaches from the users' first rows; `_reach` finds them by doubling, with next,
# next(next), and so on, in a number of steps that is logarithmic in a user's windows.


@dataclass(frozen=True)
class ExposureWindows:
    """A function that cuts the groups of an element, users' exposures in order of time, into windows.

    Attributes:
      time: The column of times.
      within: An exposure belongs to a window if its time is less than that of the window's first plus this.
      generation: The column of generations; all exposures of a window have the same one. None: ignored.
      tail: The store's column -> the list column of the exposures' tails; empty: there are none.
      tail_time: Which of the store's columns is the time.

    Raises:
      ConfigError: ``within`` is below 1.
    """

    time: str
    within: int
    generation: str | None
    tail: Mapping[str, str]
    tail_time: str

    def __post_init__(self) -> None:
        whole_number("late: within", self.within, least=1)

    def check(self, schema: Schema) -> None:
        """Check that times are whole numbers.

        Raises:
          ConfigError: They aren't.
        """
        if schema[self.time].dtype != "int64":
            raise ConfigError(f"late: share='window' needs an int64 time, got {schema[self.time]}")

    @tf.autograph.experimental.do_not_convert  # no Python branch on a tensor, so tracing is quicker
    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        """Return the element with a group for each window."""
        columns, splits = element["columns"], element["row_splits"]
        owners = tf.repeat(tf.range(tf.size(splits, tf.int64) - 1), splits[1:] - splits[:-1])
        ends = self._ends(columns[self.time], owners)
        for changes in self._changes(columns):
            ends = tf.minimum(ends, _next_of(changes, ends))
        begins = _reach(splits[:-1], ends)
        users = tf.gather(owners, begins)
        return {
            **element,
            "task": tf.gather(element["task"], users),
            "batch_id": tf.gather(element["batch_id"], users),
            "row_splits": tf.concat([begins, splits[-1:]], axis=0),
        }

    def _ends(self, times: tf.Tensor, owners: tf.Tensor) -> tf.Tensor:
        """Return, for each row, the first row after the window that starts at it."""
        endless = times > times.dtype.max - self.within
        both = tf.concat([times, tf.where(endless, times, times + self.within)], axis=0)
        size = tf.size(both, tf.int64)
        ranks, of_ends = tf.split(tf.searchsorted(tf.sort(both), both, out_type=tf.int64), 2)
        of_times = owners * size + ranks
        of_limits = owners * size + tf.where(endless, size, of_ends)
        found = tf.searchsorted(of_times, of_limits, out_type=tf.int64)
        return tf.maximum(found, tf.range(1, tf.size(times, tf.int64) + 1))

    def _changes(self, columns: dict[str, Any]) -> list[tf.Tensor]:
        """Mark rows, (rows - 1,) bool from the second on, that can't share a history with the row before."""
        changes = []
        if self.generation is not None:
            generations = columns[self.generation]
            changes.append(generations[1:] != generations[:-1])
        if self.tail:
            tails = {name: columns[of] for name, of in self.tail.items()}
            changes.append(_late_tails(columns[self.time], tails, self.tail_time))
        return changes


def _next_of(changes: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return for each of `rows` the next row that is marked, or the number of rows."""
    size = tf.size(rows, tf.int64)
    marked = tf.concat([tf.where(changes)[:, 0] + 1, [size]], axis=0)
    return tf.gather(marked, tf.searchsorted(marked, tf.range(size), side="right"))


def _late_tails(times: tf.Tensor, tails: dict[str, tf.RaggedTensor], tail_time: str) -> tf.Tensor:
    """Mark rows, from the second on, whose tail before the previous row's time isn't that row's tail."""
    happened = tails[tail_time][1:]
    was_before = happened.with_values(happened.values < tf.gather(times, happened.value_rowids()))
    lengths = tails[tail_time].row_lengths()[:-1]
    differ = tf.math.reduce_sum(tf.cast(was_before, tf.int64), axis=1) != lengths
    same = tf.where(~differ)[:, 0]
    for own in tails.values():
        now = tf.gather(tf.ragged.boolean_mask(own[1:], was_before), same)
        before = tf.gather(own[:-1], same)
        others = tf.boolean_mask(before.value_rowids(), now.values != before.values)
        differ = tf.tensor_scatter_nd_update(
            differ, tf.gather(same, others)[:, None], tf.ones_like(others, tf.bool)
        )
    return differ


def _reach(first: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
    """Return the numbers, ascending, of the rows that `following` reaches from the `first` ones."""
    size = tf.size(following, tf.int64)
    jump = tf.concat([following, [size]], axis=0)  # the place past the last is followed by itself
    reached = tf.scatter_nd(first[:, None], tf.ones_like(first), tf.shape(jump, tf.int64)) > 0

    def double(reached: tf.Tensor, jump: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        more = reached | (tf.math.unsorted_segment_max(tf.cast(reached, tf.int32), jump, size + 1) > 0)
        return more, tf.gather(jump, jump), tf.reduce_any(more != reached)

    reached, _, _ = tf.while_loop(lambda *state: state[2], double, (reached, jump, size > 0))
    return tf.where(reached[:-1])[:, 0]


_ALL_ROWS = 2**31 - 1


def late(
    examples: str | os.PathLike[str] | Stream,
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
    user: str | None = None,
    start: Start | StreamPosition = 0,
    options: ReadOptions = DEFAULTS,
) -> tf.data.Dataset:
    """Read batches of sequences as `gmeta.io.sequences` returns them, with histories from a store.

    The examples are a prepared data set of exposures only: ``gmeta prepare --task user --time timestamp`` on
    the items shown to users, in the store's unit of time. With ``--batch-rows 1``, each exposure is an
    example; without it, all exposures of a user form one. An example's history is the newest `longest` events
    before its last exposure. A model that attends by time (`gmeta.ops.AttentionMask`) keeps earlier exposures
    from seeing later events.

    With ``generation``, a history is that of the generation that the ranker read, without events that arrived
    later. Events that the ranker had but that generation lacks are the ``tail``, which the example contains.
    Both together reproduce the ranker's history from any later generation of the store.

    The examples may also be a stream of exposures (`gmeta.io.stream`, `gmeta.io.join`), each of which is a
    sequence of one exposure. Name its column of users by ``user``. Its column of times is in the store's
    unit, ``start`` is a `StreamPosition` or 0, and the label of a join is added to ``labels``.

    Examples of users whose events `gmeta history scrub` has since deleted are skipped, and counted in
    ``options.stats`` as ``"deleted"``. Without ``generation``, these are all examples of users who were ever
    deleted, including those who returned.

    Args:
      examples: ``"<folder>/<split>"`` of the prepared data set; its task is the user.
      store: The store.
      history: Columns of events, of one group of the store, or the store's time.
      targets: As for `gmeta.io.sequences`.
      labels: As for `gmeta.io.sequences`.
      contexts: As for `gmeta.io.sequences`.
      generation: The examples' column with the number of the generation that the ranker read. None: all
        generations up to the store's own.
      tail: Column of `history` -> the examples' list column with the values of the tail's events. It must
        contain all of `history` and the store's time. Events are ordered by time, those of the store first.
      longest: Maximum number of events of a history, including the tail; the newest are kept. None: all.
      window: Maximum age of events at the example's last exposure, in the unit of time: an event at time e is
        in the history of an exposure at t if t - window <= e < t. None: no limit.
      check: Compares each history, including the tail, with a number that the ranker logged with the
        example's last exposure: ``"length"``, its number of events, at most `longest`; ``"crc"``, its
        checksum by `history_crc_of_ragged` over the columns of `history` in this order. A different history
        raises an error; with ``on_bad="skip"``, the example is skipped, and counted in ``options.stats`` as
        ``"other_history"``.
      check_column: The examples' int64 column with that number. None: ``"history_length"`` or
        ``"history_crc"``.
      share: With ``"window"``, a user's exposures become one sequence per window: a window starts at an
        exposure, and contains those that follow in less than `within`. It has the history before its last
        exposure, and `contexts` of its first. With a generation or a tail, an exposure starts a new window if
        its history has events that had happened, but not arrived, by the previous exposure. Prepare such
        examples without ``--batch-rows``. A batch then contains the windows of ``sequences_per_batch`` users.
      within: The length of a window, in the unit of time.
      sequences_per_batch: As for `gmeta.io.sequences`.
      balance: Make batches of about equal cost instead. A sequence's tokens are the events of its history,
        which is ``"history_length"`` or the column ``balance.tokens`` of the last exposure, and its
        exposures. At most `longest` events count, unless ``balance`` sets its own limit. Not with `share`.
      min_rows: As for `gmeta.io.sequences`.
      user: The column of users, of a stream. None for a prepared data set, which records its own.
      start: As for `gmeta.io.sequences`.
      options: As for `gmeta.io.sequences`. With ``on_bad="skip"``, the history of a damaged stripe is empty,
        unless `check` skips the example. ``options.stats`` counts the histories, and the reads.

    Returns:
      A dataset whose elements, cardinality and saved states are those of `gmeta.io.sequences`.

    Raises:
      ConfigError: A column is missing in the examples or in the store, or an argument is out of range.
      DataError: There is no manifest, or it doesn't match its shards.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating, as for `gmeta.io.groups` and
        `HistoryStore.read`; a history differs from the ranker's.

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
    if isinstance(examples, Stream):
        given = {
            "min_rows": (min_rows, 1),
            "balance": (balance, None),
            "share": (share, None),
            "within": (within, None),
        }
        for name, (value, default) in given.items():
            if value != default:
                raise ConfigError(f"late: {name}={value!r} is for prepared examples, and a stream is given")
        return _of_stream(
            examples,
            lambda where, time: _plan(
                where,
                time,
                store,
                history,
                targets,
                generation,
                tail,
                longest,
                window,
                check,
                check_column,
                options,
            ),
            user=user,
            contexts=contexts,
            targets=targets,
            labels=labels or (),
            batch_size=whole_number("late: sequences_per_batch", sequences_per_batch, least=1),
            start=start,
        )
    if user is not None:
        raise ConfigError(f"late: user={user!r} is for a stream; a prepared data set records its users")
    if isinstance(start, StreamPosition):
        raise ConfigError(
            "late: a StreamPosition is for a stream, and the examples are prepared: give another start"
        )
    opened = open_split(examples, options.on_bad)
    time = opened.roles.time
    if time is None:
        raise ConfigError(f"late: {os.fspath(examples)} was prepared without a time: prepare it with --time")
    if labels is None:
        labels = (opened.roles.label,) if targets and opened.roles.label else ()
    where = os.fspath(examples)
    plan = _plan(
        where, time, store, history, targets, generation, tail, longest, window, check, check_column, options
    )
    tail = dict(tail or {})
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


def _plan(
    where: str,
    time: str,
    store: HistoryStore,
    history: Sequence[str],
    targets: Sequence[str],
    generation: str | None,
    tail: Mapping[str, str] | None,
    longest: int | None,
    window: int | None,
    check: Check | None,
    check_column: str | None,
    options: ReadOptions,
) -> HistoryPlan:
    bad = (options.on_bad, options.stats)
    if check is None and check_column is not None:
        raise ConfigError(f"late: check_column={check_column!r} needs check='crc' or check='length'")
    column = check_column or (CRC_COLUMN if check == "crc" else LENGTH_COLUMN)
    compared = None if check is None else LoggedCheck(check, column, longest, where, store.path, *bad)
    return HistoryPlan(
        store, history, time, generation, dict(tail or {}), longest, window, targets, *bad, compared
    )


def _of_stream(
    examples: Stream,
    make_plan: Callable[[str, str], HistoryPlan],
    *,
    user: str | None,
    contexts: Sequence[str],
    targets: Sequence[str],
    labels: Sequence[str],
    batch_size: int,
    start: Start | StreamPosition,
) -> tf.data.Dataset:
    """Read the exposures of a stream, each as a sequence, with histories."""
    source = examples.sources[0]
    where, names = source.log.name, examples.schema.names
    if source.time is None or user is None:
        raise ConfigError(
            f"late: {where} needs its columns of users and times: user='user' and stream(time='ts')"
        )
    if examples.joining is not None and examples.joining.corrections:
        raise ConfigError("late: a batch of sequences has no weights, which corrections= of the join needs")
    if start != 0 and not isinstance(start, StreamPosition):
        raise ConfigError(f"late: a stream starts at a StreamPosition, got {start!r}")
    plan = make_plan(where, source.time)
    labels = [*labels, *([examples.joining.label] if examples.joining is not None else [])]
    shown = list(dict.fromkeys([*targets, *plan.needed]))
    if missing := [name for name in (user, *contexts, *shown, *labels) if name not in names]:
        raise ConfigError(f"late: {where} has no column {', '.join(missing)}; it has {', '.join(names)}")

    @tf.autograph.experimental.do_not_convert
    def sequence(columns: dict[str, Any]) -> dict[str, Any]:
        splits = tf.range(tf.size(columns[user], tf.int64) + 1)

        def single(column: Any) -> tf.RaggedTensor:
            return tf.RaggedTensor.from_row_splits(column, splits, validate=False)

        return {
            "task": columns[user],
            "contexts": {name: columns[name] for name in contexts},
            "history": {},
            "targets": {name: single(columns[name]) for name in shown},
            "labels": {name: single(tf.cast(columns[name], tf.float32)) for name in labels},
        }

    rows = examples.columns(batch_size, start=start if isinstance(start, StreamPosition) else None)
    return rows.map(sequence).map(plan)
