"""Writes a shard of a generation: new events as stripes, and the index of all that the shard has."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import HistoryShard, shard_files
from gmeta.preprocess.history.files.generation import Generation
from gmeta.preprocess.history.files.shard_reader import PLACE, REQUEST, Index, ShardReader, encode_index
from gmeta.preprocess.history.files.stripe import StripeEncoder
from gmeta.preprocess.history.files.stripe_layout import Rewrite, build_index, cut, describe, owners

Ints = NDArray[np.int64]
_ALL = np.iinfo(np.int64)


class Earlier(NamedTuple):
    """What a shard has before an append.

    Attributes:
      stripes: The shard's index.
      files: The number of each file that the index names -> its path.
    """

    stripes: Index
    files: Mapping[int, Path]


class Written(NamedTuple):
    """What has been written.

    Attributes:
      shard: The manifest's entry.
      reads: The generations whose files the index names.
    """

    shard: HistoryShard
    reads: set[int]


def read_earlier(before: Generation | None, shard: int) -> Earlier:
    """Return what a shard of a generation has; nothing without one."""
    if before is None:
        return Earlier(Index(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, PLACE)), {})
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
    """Write the stripes and the index of a shard.

    The stripes of a group lie side by side, in the order of users; a user's events are ordered by time and
    birth.

    Args:
      folder: The generation's folder.
      number: The shard's number.
      generation: The generation's number, the birth of the new events.
      rows: (N, 2 + columns) int64: the new events, ordered by all their columns; user and time come first.
      groups: For each group the numbers of its columns in `rows`.
      stripe_events: Most events of a stripe.
      earlier: What the shard has.
      rewrite: Which of its stripes are written anew, with the new events.

    Raises:
      DataError: A stripe that is to be written anew is damaged.
      OSError: The disk is full.
    """
    events_path, index_path = shard_files(folder, number)
    joined = ShardReader(encode_index(rewrite.joined), earlier.files, where=str(index_path))
    encoder, owner, places, at = StripeEncoder(), [owners(earlier.stripes)[rewrite.kept]], [], 0
    places.append(earlier.stripes.places[rewrite.kept])
    try:
        with _NewFile(events_path) as file:
            for group, numbers in enumerate(groups):
                columns = _join(
                    _read_all(joined, rewrite.joined.users, group, len(numbers)),
                    [
                        rows[:, 0],
                        rows[:, 1],
                        np.full(len(rows), generation),
                        *rows[:, numbers].T,
                    ],
                )
                ends = cut(columns[0], stripe_events)
                data, byte_ends = encoder.encode(columns[1:], ends)
                file.write(data)
                placed = describe(
                    columns[1], columns[2], ends, byte_ends, group=group, file=generation, offset=at
                )
                places.append(placed)
                owner.append(columns[0][ends - 1])
                at += len(data)
    finally:
        joined.close()
        encoder.close()
    index = build_index(np.concatenate(owner), np.concatenate(places))
    with _NewFile(index_path) as index_file:
        index_file.write(encode_index(index))
    first_group = index.places["group"] == 0
    shard = HistoryShard(
        users=len(index.users),
        stripes=len(index.places),
        events=int(index.places["events"][first_group].sum()),
        bytes=file.bytes,
        sha256=file.digest,
        index_bytes=index_file.bytes,
        index_sha256=index_file.digest,
    )
    return Written(shard, set(np.unique(index.places["file"]).tolist()))


def _read_all(reader: ShardReader, users: Ints, group: int, columns: int) -> list[Ints]:
    """Return the columns user, time, birth and the group's of all events of a reader."""
    requests = np.zeros(len(users), REQUEST)
    requests["user"], requests["start"] = users, _ALL.min
    requests["until"] = requests["generation"] = _ALL.max
    found = reader.scan(requests, range(2 + columns), group=group, longest=_ALL.max)
    return [np.repeat(users, np.diff(found.row_splits)), *found.columns]


def _join(old: Sequence[Ints], new: Sequence[Ints]) -> list[Ints]:
    """Return the events of both, ordered by user, time and birth as each is; what ties keeps its order."""
    if not len(old[0]) or not len(new[0]):
        return list(old if len(old[0]) else new)
    columns = [np.concatenate(pair) for pair in zip(old, new, strict=True)]
    order = np.lexsort((columns[2], columns[1], columns[0]))
    return [column[order] for column in columns]


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
