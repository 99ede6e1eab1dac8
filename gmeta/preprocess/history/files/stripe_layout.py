"""Which events go into which stripes: the arithmetic of an append, on arrays of all users of a shard."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.preprocess.history.files.shard_reader import PLACE, Index

MOST_PARTIAL = 12
"""The stripes of a user that aren't full. When there are so many, the next append joins them.

An append writes a user's new events as stripes of their own, and so writes nothing anew. But each of these
stripes lies in another file, and a reader has to read each. With 12 of them, and stripes of 256, the events
of a user who comes every day are written three to four times in all.
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


def find_partial(index: Index, users: Ints, stripe_events: int) -> Rewrite:
    """Find the stripes that an append joins with the new events of `users`, (U,) ascending.

    These are, of a user who has `MOST_PARTIAL` of them in a group, all that aren't full. Of the stripes that
    an append writes for a user only the last isn't full, so events of one time and birth stay in their order
    if it moves into a later file.
    """
    places, owner = index.places, owners(index)
    kept = np.ones(len(places), np.bool_)
    if not len(places):
        return Rewrite(_take(index, owner, ~kept), kept)
    begins = np.flatnonzero(
        np.concatenate(([True], (owner[1:] != owner[:-1]) | (places["group"][1:] != places["group"][:-1])))
    )
    partly = places["events"] < stripe_events
    many = np.add.reduceat(partly.astype(np.int64), begins) >= MOST_PARTIAL
    kept = ~(partly & np.repeat(many, np.diff(begins, append=len(places))) & np.isin(owner, users))
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
