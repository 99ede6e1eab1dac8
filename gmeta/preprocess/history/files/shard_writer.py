"""Appends events to a shard: writes them as stripes, and an index that names the stripes of before too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.preprocess.history.files.generation import Generation
from gmeta.preprocess.history.files.new_shard import Kept, Written, write_stripes
from gmeta.preprocess.history.files.shard_reader import PLACE, REQUEST, Index, ShardReader, encode_index
from gmeta.preprocess.history.files.stripe_layout import Rewrite, deletions_of, owners

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


def read_earlier(before: Generation | None, shard: int) -> Earlier:
    """Return what a shard of a generation has; nothing without one."""
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
    """Write the new events of a shard, and those of its stripes that are written anew.

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
