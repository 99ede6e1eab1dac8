"""Which events go into which stripes: the arithmetic of an append, on arrays of all users of a shard."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.preprocess.history.files.shard_reader import PLACE, Index

MOST_TIMES = 1
"""An append joins a stripe that isn't full with newer events, if it has at most so many times their number.

An append writes a user's new events as stripes of their own, and each of these lies in another file, where a
reader has to read it. Joined stripes are fewer reads, but their events are written anew. Joined with at least
as many, an event is in a stripe twice as long each time, and never again once that is full: so with stripes
of 256, the events of a user who comes every day are written four times in all, and the user has about four
stripes that aren't full. A fixed number of them before all are joined costs as much, and twice the reads.
"""

Ints = NDArray[np.int64]


class Rewrite(NamedTuple):
    """What is written anew of an index.

    Attributes:
      joined: The index of the stripes whose events are written anew.
      kept: (S,) bool: which of the index's stripes remain where they are.
    """

    joined: Index
    kept: NDArray[np.bool_]


class Deletions(NamedTuple):
    """Users whose events were deleted.

    Attributes:
      users: (U,) int64, in any order.
      generations: (U,) int64: the generation that deleted all events before it.
    """

    users: Ints
    generations: Ints


def deletions_of(index: Index) -> Deletions:
    """Return the deletions of an index."""
    deleted = index.deletions > 0
    return Deletions(index.users[deleted], index.deletions[deleted])


def owners(index: Index) -> Ints:
    """Return the user of each stripe of an index."""
    return np.repeat(index.users, np.diff(index.ends, prepend=0))


def count_events(index: Index) -> Ints:
    """Return the events of each user of an index, (U,)."""
    first = index.places["group"] == 0
    counts = np.zeros(len(index.users), np.int64)
    np.add.at(counts, np.searchsorted(index.users, owners(index)[first]), index.places["events"][first])
    return counts


def find_joined(index: Index, users: Ints, stripe_events: int) -> Rewrite:
    """Find the stripes that an append joins with new events, by `MOST_TIMES`.

    These are some of the newest stripes of a user that aren't full: the last, if it is short enough for the
    new events, the one before, if it is short enough for these and the last, and so on. Of the stripes that
    an append writes for a user only the last isn't full, so events of one time and birth stay in their order
    if it moves into a later file.

    Args:
      index: The stripes that there are.
      users: (N,) ascending: the user of each new event.
      stripe_events: Most events of a stripe.
    """
    places, owner = index.places, owners(index)
    kept = np.ones(len(places), np.bool_)
    partly = np.flatnonzero(places["events"] < stripe_events)
    group, owned, events = places["group"][partly], owner[partly], places["events"][partly]
    is_last = np.ones(len(partly), np.bool_)
    is_last[:-1] = (owned[1:] != owned[:-1]) | (group[1:] != group[:-1])
    at = np.flatnonzero(is_last)
    first = np.concatenate(([0], at[:-1] + 1)) if len(at) else at
    together = np.searchsorted(users, owned[at], side="right") - np.searchsorted(users, owned[at])
    while len(at):
        joins = events[at] <= MOST_TIMES * together
        kept[partly[at[joins]]] = False
        together = together[joins] + events[at[joins]]
        at, first = at[joins] - 1, first[joins]
        more = at >= first
        at, first, together = at[more], first[more], together[more]
    return Rewrite(_take(index, owner, ~kept), kept)


def cut(users: Ints, stripe_events: int) -> Ints:
    """Return the ends of the stripes of rows, whose users, (N,), ascend; all but a user's last are full.

    Example:
      >>> cut(np.array([3, 3, 3, 5]), 2)
      array([2, 3, 4])
    """
    _, starts, counts = np.unique(users, return_index=True, return_counts=True)
    stripes = -(-counts // stripe_events)
    before = np.cumsum(stripes) - stripes
    nth = np.arange(stripes.sum()) - np.repeat(before, stripes) + 1
    return np.repeat(starts, stripes) + np.minimum(nth * stripe_events, np.repeat(counts, stripes))


def describe(
    times: Ints, births: Ints, ends: Ints, byte_ends: Ints, *, group: int, file: int, offset: int
) -> NDArray[np.void]:
    """Return the places of stripes that lie one after another in a file, from `offset` on."""
    places = np.zeros(len(ends), PLACE)
    if not len(ends):
        return places
    starts = np.concatenate(([0], ends[:-1]))
    places["group"], places["file"] = group, file
    places["bytes"] = np.diff(byte_ends, prepend=0)
    places["offset"] = offset + byte_ends - places["bytes"]
    places["events"] = ends - starts
    for values, first, last in ((times, "first", "last"), (births, "born_first", "born_last")):
        places[first] = np.minimum.reduceat(values, starts)
        places[last] = np.maximum.reduceat(values, starts)
    return places


def build_index(owner: Ints, places: NDArray[np.void], deletions: Deletions) -> Index:
    """Build an index of stripes in any order; `owner` is the user of each."""
    order = np.lexsort((places["offset"], places["file"], places["group"], owner))
    users = np.union1d(owner, deletions.users)
    deleted = np.zeros(len(users), np.int64)
    np.maximum.at(deleted, np.searchsorted(users, deletions.users), deletions.generations)
    return Index(users, np.searchsorted(owner[order], users, side="right"), deleted, places[order])


def _take(index: Index, owner: Ints, chosen: NDArray[np.bool_]) -> Index:
    none = np.zeros(0, np.int64)
    return build_index(owner[chosen], index.places[chosen], Deletions(none, none))
