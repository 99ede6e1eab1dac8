"""Histories of a prepared data set: the items of each user, in order of time if there are times.

A protocol cuts them: it decides which events are trained on and which items are targets.

* ``"leave-last-out"``: a user's last item is the target in the test, the one before it in validation.
* ``"time"``: the last tenth of all events are the targets in the test, the tenth before it in validation: all
  of a user's items there, given the earlier ones.
* ``"users"``: a tenth of the users are in the test, with their last items as targets, and another tenth in
  validation. None of these users' events are trained on.
* ``"random"``: a tenth of each user's items, drawn uniformly, are the targets in the test, given all others,
  and another tenth in validation, given those that are trained on. It needs no times. The numbers are
  RecBole's for the ratios 8:1:1 by user: each tenth is rounded down, but a user with fewer than ten items has
  one in the test and one in validation, in this order, as long as two are left to train on before each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gmeta import io
from gmeta.core import collectives
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.schema import OnBad
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.next_item.side_columns import SideColumns
from gmeta.experiment.plan.next_item_config import Protocol
from gmeta.io.reader_stats import data_errors
from gmeta.io.readers.epoch import count_epochs
from gmeta.io.readers.read_options import OneEpoch

SHARE = 10
"""One in so many events, or users, is asked in the test, and as many in validation."""

_GROUPS = 256  # per element


@dataclass(frozen=True)
class Histories:
    """The events of users, user after user, each in order of time.

    Attributes:
      users: (users,) ids.
      row_splits: (users + 1,): where each user's events begin and end.
      items: (events,) the items, as numbers from 0.
      times: (events,) or None if the data set has no times.

    Example:
      >>> found = Histories(np.array([7, 9]), np.array([0, 2, 5]), np.array([3, 1, 2, 0, 1]))
      >>> found.first(np.array([1, 2])).items
      array([3, 2, 0])
      >>> found.after(np.array([1, 2])).items
      array([1, 1])
    """

    users: Ints
    row_splits: Ints
    items: Ints
    times: Ints | None = None

    def __len__(self) -> int:
        return len(self.users)

    @property
    def sizes(self) -> Ints:
        """(users,) the number of each user's events."""
        return np.diff(self.row_splits)

    @property
    def owner(self) -> Ints:
        """(events,) the place of each event's user."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @property
    def place(self) -> Ints:
        """(events,) the place of each event in its user's history, from 0."""
        return np.arange(len(self.items)) - np.repeat(self.row_splits[:-1], self.sizes)

    @property
    def from_end(self) -> Ints:
        """(events,) the place counted from the history's end; the last event has 0."""
        return np.repeat(self.row_splits[1:], self.sizes) - 1 - np.arange(len(self.items))

    def keep(self, events: NDArray[np.bool_]) -> Histories:
        """Return some of the events; users without events remain, with empty histories."""
        splits = np.concatenate([[0], np.cumsum(np.bincount(self.owner[events], minlength=len(self)))])
        times = None if self.times is None else self.times[events]
        return Histories(self.users, splits.astype(np.int64), self.items[events], times)

    def first(self, count: Ints) -> Histories:
        """Return the first ``count`` events of each user, (users,)."""
        return self.keep(self.place < np.repeat(count, self.sizes))

    def after(self, count: Ints) -> Histories:
        """Return the events of each user after the first ``count``, (users,)."""
        return self.keep(self.place >= np.repeat(count, self.sizes))

    def choose(self, users: Ints | NDArray[np.bool_] | slice) -> Histories:
        """Return some of the users."""
        chosen = np.arange(len(self))[users]
        sizes = self.sizes[chosen]
        splits = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        events = np.arange(splits[-1]) + np.repeat(self.row_splits[:-1][chosen] - splits[:-1], sizes)
        times = None if self.times is None else self.times[events]
        return Histories(self.users[chosen], splits, self.items[events], times)

    def ragged(self) -> dict[str, tf.RaggedTensor]:
        """Return the columns that a model reads: ``item``, and ``time`` if it exists."""
        columns = {"item": self.items, **({} if self.times is None else {"time": self.times})}
        return {
            name: tf.RaggedTensor.from_row_splits(tf.constant(column, tf.int64), self.row_splits)
            for name, column in columns.items()
        }


@dataclass(frozen=True)
class Asked:
    """The histories that a model reads, and the items that it must find.

    Attributes:
      histories: The histories.
      targets: The items to find, for the same users, one or several each: those that followed or, with the
        protocol ``"random"``, others.
    """

    histories: Histories
    targets: Histories

    def __len__(self) -> int:
        return len(self.histories)

    def choose(self, users: Ints | NDArray[np.bool_] | slice) -> Asked:
        """Return some of the users."""
        return Asked(self.histories.choose(users), self.targets.choose(users))


@dataclass(frozen=True)
class Cuts:
    """The three parts of a data set that a protocol cuts.

    Attributes:
      ids: (items,) the ids of the catalogue, by number.
      train: The part to which models and baselines are fitted.
      validation: The part that chooses settings, epochs and weights.
      test: The part whose results are reported.
      whole: All events of all users, for use after the test.
      columns: The columns of users and of items, if a method reads them.
    """

    ids: Ints
    train: Histories
    validation: Asked
    test: Asked
    whole: Histories
    columns: SideColumns | None = None

    @property
    def items(self) -> int:
        """The number of items in the catalogue."""
        return len(self.ids)


def read_events(
    data: Path, item: str, on_bad: OnBad = "raise", *, ordered: bool = True
) -> tuple[Histories, Ints]:
    """Read all users of a prepared data set, from all splits.

    Args:
      data: The data set, prepared with users as tasks.
      item: The column of items.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      ordered: Whether times are required. Without times, a user's events are in the order of a hash.

    Returns:
      The histories, and the items' ids, ascending.

    Raises:
      ConfigError: The data set has no times, but they are required.
      DataError: The data set can't be read, or has no rows.
    """
    manifest = Manifest.load(data)
    time = time_column(manifest)
    if time is None and ordered:
        raise ConfigError(
            f"{data} was prepared without times, so nothing shows which item came next: prepare it with "
            "--time COLUMN (of lists in order, gmeta prepare makes the column position), or train with --for "
            "retrieval, which needs no order"
        )
    columns = {"item": item, **({} if time is None else {"time": time})}
    users: list[Any] = []
    sizes: list[Any] = []
    found: dict[str, list[Any]] = {name: [] for name in columns}
    for split in manifest.splits:
        options = io.ReadOptions(shuffle=False, shard=(0, 1), on_bad=on_bad)
        with data_errors():
            for element in io.groups(
                data / split, groups_per_element=_GROUPS, start=OneEpoch(), options=options
            ):
                users.append(element["task"].numpy())
                sizes.append(np.diff(element["row_splits"].numpy()))
                for name, column in columns.items():
                    found[name].append(element["columns"][column].numpy())
    if not users:
        raise DataError("no events", path=data, advice="prepare a data set with rows")
    user = np.repeat(np.concatenate(users), np.concatenate(sizes))
    every = {name: np.concatenate(values) for name, values in found.items()}
    times = every.get("time")
    # A data set sorts a user's events at the same time by id, so a model could learn that the next id is
    # higher. A hash of user and item puts them into an order without information.
    mixed = _mix(_mix(user) + every["item"].astype(np.uint64))
    order = np.lexsort((mixed, user) if times is None else (mixed, times, user))
    known, counts = np.unique(user, return_counts=True)
    ids, numbers = np.unique(every["item"][order], return_inverse=True)
    splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Histories(known, splits, numbers.astype(np.int64), None if times is None else times[order]), ids


def _mix(values: Ints) -> NDArray[np.uint64]:
    """Return a hash of each value (SplitMix64's)."""
    found = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


def time_column(manifest: Manifest) -> str | None:
    """Return the column of times of a prepared data set; None if it has none."""
    own = (manifest.config.get("table") or {}).get("time")
    return own or ("timestamp" if "timestamp" in manifest.schema else None)  # as in MovieLens folders


def first_of_each(events: Histories) -> Histories:
    """Keep only each user's first event with an item, so that a user's items are a set."""
    pairs = events.owner * (int(events.items.max(initial=0)) + 1) + events.items
    kept = np.zeros(len(pairs), bool)
    kept[np.unique(pairs, return_index=True)[1]] = True
    return events.keep(kept)


def core(events: Histories, ids: Ints, users: int, items: int) -> tuple[Histories, Ints]:
    """Leave out users with fewer than ``users`` events and items with fewer than ``items``, repeatedly.

    This is the k-core of the literature, with a bound for each side.

    Returns:
      The remaining histories, and their items' ids.

    Raises:
      DataError: Nothing is left.
    """
    while len(events.items):
        rare = np.bincount(events.items, minlength=len(ids)) < items
        short = events.sizes < users
        kept = ~rare[events.items] & ~short[events.owner]
        if kept.all():
            break
        events = events.keep(kept)
    if not len(events.items):
        raise DataError(
            f"no user with at least {users} events of items with at least {items} is left",
            advice="give a smaller core",
        )
    events = events.choose(events.sizes > 0)
    kept_items, numbers = np.unique(events.items, return_inverse=True)
    return replace(events, items=numbers.astype(np.int64)), ids[kept_items]


def cut(events: Histories, ids: Ints, protocol: Protocol, seed: int = 0) -> Cuts:
    """Cut histories by a protocol.

    The catalogue has only the items of the training part. An item that is new in validation or test can't be
    found, and counts as a miss.

    Args:
      events: The histories.
      ids: The ids of their items.
      protocol: The protocol.
      seed: The seed of the draw of users, or of events, for the protocols ``"users"`` and ``"random"``.

    Raises:
      ConfigError: The protocol requires times, and there are none.
      DataError: A part is empty.
    """
    train, validation, test = _CUTTERS[protocol](events, seed)
    known = np.unique(train.items)
    for part, name in ((validation, "validation"), (test, "the test")):
        if len(part) and not np.isin(part.targets.items, known).any():
            raise DataError(
                f"protocol {protocol!r}: of {len(part.targets.items):,} items that {name} asks for, none is "
                "in training, and a new item can't be found",
                advice="give more data, or another protocol",
            )
    if not (len(train.items) and len(validation) and len(test)):
        raise DataError(
            f"protocol {protocol!r} leaves {len(train.items):,} events to train on, {len(validation):,} "
            f"users for validation and {len(test):,} for the test",
            advice="give more data, or another protocol",
        )
    number = np.full(len(ids), -1)
    number[known] = np.arange(len(known))

    def renumber(found: Histories) -> Histories:
        return replace(found, items=number[found.items])

    def known_part(found: Histories) -> Histories:
        found = renumber(found)
        return found.keep(found.items >= 0)

    def asked(part: Asked) -> Asked:
        return Asked(known_part(part.histories), renumber(part.targets))

    return Cuts(ids[known], renumber(train), asked(validation), asked(test), known_part(events))


_Parts = tuple[Histories, Asked, Asked]


def _leave_last_out(events: Histories, seed: int) -> _Parts:
    sizes = events.sizes
    long = sizes >= 3
    asked = events.choose(long)
    own = asked.sizes
    until = {back: asked.first(own - back) for back in (1, 2)}
    return (
        events.first(np.where(long, sizes - 2, sizes)),
        Asked(until[2], until[1].after(own - 2)),
        Asked(until[1], asked.after(own - 1)),
    )


def _by_time(events: Histories, seed: int) -> _Parts:
    if events.times is None:
        raise ConfigError("protocol 'time' needs times: prepare the data set with --time COLUMN")
    times = events.times
    begin, end = np.quantile(times, [1 - 2 / SHARE, 1 - 1 / SHARE], method="higher")

    def part(least: int, most: int) -> Asked:
        histories = events.keep(times < least)
        targets = events.keep((times >= least) & (times < most))
        both = (histories.sizes > 0) & (targets.sizes > 0)
        return Asked(histories.choose(both), targets.choose(both))

    late = int(times.max()) + 1
    return events.keep(times < begin), part(int(begin), int(end)), part(int(end), late)


def _by_users(events: Histories, seed: int) -> _Parts:
    long = np.flatnonzero(events.sizes >= 2)
    drawn = np.random.default_rng(seed).permutation(long)
    share = max(len(drawn) // SHARE, 1)

    def part(users: Ints) -> Asked:
        chosen = events.choose(np.sort(users))
        return Asked(chosen.first(chosen.sizes - 1), chosen.after(chosen.sizes - 1))

    held = drawn[: 2 * share]
    others = np.setdiff1d(np.arange(len(events)), held)
    return events.choose(others), part(held[:share]), part(held[share:])


def _at_random(events: Histories, seed: int) -> _Parts:
    drawn = np.random.default_rng(seed).random(len(events.items))
    place = np.empty_like(events.place)
    place[np.lexsort((drawn, events.owner))] = events.place
    sizes = events.sizes
    left = sizes - 2 * (sizes // SHARE)
    counts = []
    for _ in ("test", "validation"):
        one = (sizes < SHARE) & (left > 1)
        left = left - one
        counts.append(sizes // SHARE + one)
    until_test = np.repeat(sizes - counts[0], sizes)
    trained = place < np.repeat(left, sizes)

    def part(histories: NDArray[np.bool_], targets: NDArray[np.bool_]) -> Asked:
        some = events.keep(targets).sizes > 0
        return Asked(events.keep(histories).choose(some), events.keep(targets).choose(some))

    return (
        events.keep(trained),
        part(trained, ~trained & (place < until_test)),
        part(place < until_test, place >= until_test),
    )


_CUTTERS: dict[str, Callable[[Histories, int], _Parts]] = {
    "leave-last-out": _leave_last_out,
    "time": _by_time,
    "users": _by_users,
    "random": _at_random,
}


# Histories as a dataset.


def in_batches(columns: Mapping[str, Any], users_per_batch: int, seed: int, epoch: int) -> tf.data.Dataset:
    """Return batches of users, in a new order in each epoch, from ``epoch`` on.

    On several ranks, a batch has this rank's part of the step's users.

    Args:
      columns: Name -> a tensor or a ragged tensor with a row for each user.
      users_per_batch: The number of users in a step, over all ranks.
      seed: The seed of the order of users, which is a function of (seed, epoch).
      epoch: The first epoch.
    """
    users = next(iter(columns.values())).shape[0]
    if not users:
        raise DataError(
            "no user has two items in training, so there is nothing to learn from histories",
            advice="give more data, a core such as [5, 5], or another protocol",
        )
    rows = tf.range(users, dtype=tf.int64)
    shares = collectives.world().shares

    def order(number: tf.Tensor) -> tf.data.Dataset:
        key = tf.stack([tf.constant(seed, tf.int64), number])
        drawn = tf.random.experimental.stateless_shuffle(rows, seed=key)
        return tf.data.Dataset.from_tensor_slices(drawn)

    def read(chosen: tf.Tensor) -> dict[str, Any]:
        if shares.count < shares.total:
            share = tf.range(tf.size(chosen)) % shares.total
            chosen = chosen[(share >= shares.first) & (share < shares.first + shares.count)]
        return {name: tf.gather(column, chosen) for name, column in columns.items()}

    batches = count_epochs(epoch).flat_map(order).batch(users_per_batch).map(read).prefetch(2)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    steps = -(-users // users_per_batch)
    return batches.apply(tf.data.experimental.assert_cardinality(steps)).with_options(options)
