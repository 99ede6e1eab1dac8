"""Appends events to a shard: writes them as stripes, and an index that also names the earlier stripes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.core.history_manifest import HistoryShard, shard_files, user_shards
from gmeta.preprocess.history.generation import Generation
from gmeta.preprocess.history.shard_reader import (
    PLACE,
    REQUEST,
    Index,
    ShardReader,
    StripeEncoder,
    encode_index,
)

# Which events go into which stripes: the arithmetic of an append, on arrays of all users of a shard.

MOST_TIMES = 1
"""An append joins a stripe that isn't full with newer events if it has at most this many times their number.

An append writes a user's new events as new stripes, and those of each append are in another file, which costs
a reader another read. Joining stripes saves reads, but rewrites their events. If a stripe is joined only with
at least as many events, each rewrite puts an event into a stripe at least twice as long, until that is full:
with stripes of 256, the events of a user who comes every day are written four times in all, and the user has
about four stripes that aren't full. Joining all of them whenever a fixed number is reached costs as much, and
twice the reads.
"""

Ints = NDArray[np.int64]


class Rewrite(NamedTuple):
    """The rewritten part of an index.

    Attributes:
      joined: The index of the stripes whose events are rewritten.
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
    new events, the one before, if it is short enough for these and the last, and so on. Only the last stripe
    that an append writes for a user isn't full, so events of one time and birth stay in their order if it
    moves into a later file.

    Args:
      index: The existing stripes.
      users: (N,) ascending: the user of each new event.
      stripe_events: The largest number of events of a stripe.
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
    """Return the ends of the stripes of rows with ascending users, (N,); all but a user's last are full.

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


# Writes a shard of a generation: events as stripes, and the index of all its stripes.


class Kept(NamedTuple):
    """The contents of a shard other than the stripes that are written.

    Attributes:
      owner: (S,) int64: the user of each stripe.
      places: (S,) `PLACE`: the stripes, in files of earlier generations.
      deletions: The users whose events were deleted.
    """

    owner: Ints
    places: NDArray[np.void]
    deletions: Deletions


class Written(NamedTuple):
    """The result of writing a shard.

    Attributes:
      shard: The manifest's entry.
      reads: The generations whose files the index names.
    """

    shard: HistoryShard
    reads: set[int]


def write_stripes(
    folder: Path,
    number: int,
    generation: int,
    tables: Iterable[Sequence[Ints]],
    stripe_events: int,
    kept: Kept,
) -> Written:
    """Write the stripes and the index of a shard.

    The stripes of a group lie side by side, in the order of users.

    Args:
      folder: The generation's folder.
      number: The shard's number.
      generation: The generation's number.
      tables: The columns of each group: user, time, birth and the group's own, ordered by the first three.
      stripe_events: The largest number of events of a stripe.
      kept: The shard's other stripes, and its deletions.

    Raises:
      OSError: The disk is full.
    """
    events_path, index_path = shard_files(folder, number)
    owner, places, at = [kept.owner], [kept.places], 0
    with closing(StripeEncoder()) as encoder, _NewFile(events_path) as file:
        for group, columns in enumerate(tables):
            ends = cut(columns[0], stripe_events)
            data, byte_ends = encoder.encode(columns[1:], ends)
            file.write(data)
            places.append(
                describe(columns[1], columns[2], ends, byte_ends, group=group, file=generation, offset=at)
            )
            owner.append(columns[0][ends - 1])
            at += len(data)
    index = build_index(np.concatenate(owner), np.concatenate(places), kept.deletions)
    with _NewFile(index_path) as index_file:
        index_file.write(encode_index(index))
    first_group = index.places["group"] == 0
    shard = HistoryShard(
        users=int((np.diff(index.ends, prepend=0) > 0).sum()),
        deleted=len(kept.deletions.users),
        stripes=len(index.places),
        events=int(index.places["events"][first_group].sum()),
        bytes=file.bytes,
        sha256=file.digest,
        index_bytes=index_file.bytes,
        index_sha256=index_file.digest,
    )
    return Written(shard, set(np.unique(index.places["file"]).tolist()))


class _NewFile:
    """A file that is on the disk when the block ends.

    Attributes:
      bytes: Its size.
      digest: SHA-256 of its content.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.bytes, self._hash = path, 0, hashlib.sha256()

    def __enter__(self) -> _NewFile:
        self._file = self._path.open("xb")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


_ALL = np.iinfo(np.int64)


class Earlier(NamedTuple):
    """The contents of a shard before an append.

    Attributes:
      stripes: The shard's index.
      files: The file's number in the index -> its path.
    """

    stripes: Index
    files: Mapping[int, Path]


def read_earlier(before: Generation | None, shard: int) -> Earlier:
    """Return the contents of a generation's shard; empty without a generation."""
    if before is None:
        none = np.empty(0, np.int64)
        return Earlier(Index(none, none, none, np.empty(0, PLACE)), {})
    with closing(before.open(shard)) as reader:
        return Earlier(reader.index(), before.files(shard))


def write_shard(
    folder: Path,
    number: int,
    generation: int,
    rows: Ints,
    groups: Sequence[Sequence[int]],
    stripe_events: int,
    earlier: Earlier,
    rewrite: Rewrite,
) -> Written:
    """Write the new events of a shard, and those of its stripes that are rewritten.

    Args:
      folder: The generation's folder.
      number: The shard's number.
      generation: The generation's number, the birth of the new events.
      rows: (N, 2 + columns) int64: the new events, ordered by all their columns; user and time come first.
      groups: The numbers of each group's columns in `rows`.
      stripe_events: The largest number of events of a stripe.
      earlier: The shard's contents before the append.
      rewrite: The stripes to rewrite together with the new events.

    Raises:
      DataError: A stripe to rewrite is damaged.
      OSError: The disk is full.
    """
    new = [rows[:, 0], rows[:, 1], np.full(len(rows), generation)]
    where = f"{folder}, shard {number}"
    with closing(ShardReader(encode_index(rewrite.joined), earlier.files, where=where)) as joined:

        def tables() -> Iterator[list[Ints]]:
            for group, numbers in enumerate(groups):
                old = _read_all(joined, rewrite.joined.users, group, len(numbers))
                yield _join(old, [*new, *rows[:, numbers].T])

        kept = Kept(
            owners(earlier.stripes)[rewrite.kept],
            earlier.stripes.places[rewrite.kept],
            deletions_of(earlier.stripes),
        )
        return write_stripes(folder, number, generation, tables(), stripe_events, kept)


def _read_all(reader: ShardReader, users: Ints, group: int, columns: int) -> list[Ints]:
    """Return the columns of all events of a reader: user, time, birth and the group's."""
    requests = np.zeros(len(users), REQUEST)
    requests["user"], requests["start"] = users, _ALL.min
    requests["until"] = requests["generation"] = _ALL.max
    found = reader.scan(requests, range(2 + columns), group=group, longest=_ALL.max)
    return [np.repeat(users, np.diff(found.row_splits)), *found.columns]


def _join(old: Sequence[Ints], new: Sequence[Ints]) -> list[Ints]:
    """Merge events, both ordered by user, time and birth; ties keep their order."""
    if not len(old[0]) or not len(new[0]):
        return list(old if len(old[0]) else new)
    columns = [np.concatenate(pair) for pair in zip(old, new, strict=True)]
    order = np.lexsort((columns[2], columns[1], columns[0]))
    return [column[order] for column in columns]


# Events of an append on the disk, divided by shard, in the order in which they arrive.


class EventSpill:
    """Rows of 64-bit words in a file for each shard.

    Args:
      folder: An empty folder.
      columns: The number of words of a row; the first is the user.
      shards: The number of shards.

    Attributes:
      events: The number of events added.
    """

    def __init__(self, folder: Path, columns: int, shards: int) -> None:
        self._folder, self._columns, self._shards = folder, columns, shards
        self.events = 0

    def add(self, words: NDArray[np.int64]) -> None:
        """Add events, (N, columns).

        Raises:
          OSError: The disk is full.
        """
        shard = user_shards(words[:, 0], self._shards).astype(np.uint16)  # which NumPy sorts by radix
        order = np.argsort(shard, kind="stable")
        words = words[order]
        edges = np.searchsorted(shard[order], np.arange(self._shards + 1))
        for number in np.flatnonzero(np.diff(edges)).tolist():
            with self._path(number).open("ab") as file:
                file.write(words[edges[number] : edges[number + 1]].tobytes())
        self.events += len(words)

    def take(self, shard: int) -> NDArray[np.int64]:
        """Return a shard's events, (N, columns), and remove them."""
        path = self._path(shard)
        if not path.exists():
            return np.empty((0, self._columns), np.int64)
        words = np.fromfile(path, np.int64).reshape(-1, self._columns)
        path.unlink()
        return words

    def _path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.rows"


def sort_events(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return events, (N, columns), ordered by all columns; the values of a column lie side by side.

    The first two, user and time, almost always decide; only ties are ordered by the others.
    """
    columns = np.ascontiguousarray(words.T)
    user, time = columns[:2]
    order = np.lexsort((time, user))
    user, time = user[order], time[order]
    same = np.flatnonzero((user[1:] == user[:-1]) & (time[1:] == time[:-1]))
    tied = np.union1d(same, same + 1)
    order[tied] = order[tied][np.lexsort(columns[::-1, order[tied]])]
    return columns[:, order].T
