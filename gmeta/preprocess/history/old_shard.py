"""Reads what a store has for a shard of its next generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import user_shards
from gmeta.preprocess.history.files.generation import Generation
from gmeta.preprocess.history.files.shard_reader import REQUEST, ShardReader
from gmeta.preprocess.history.files.stripe_layout import Deletions
from gmeta.preprocess.history.schema_change import default_word
from gmeta.preprocess.history.spec import HistorySpec

Ints = NDArray[np.int64]
_ALL = np.iinfo(np.int64)


class OldShard:
    """The events of the users of a shard of another spec.

    A shard is a range of hashes. With another number of shards its users are in one or more shards of the
    generation before, which are read one after another.

    Args:
      before: The generation.
      shard: The number of the new shard.
      spec: The new spec; the shard is one of its ``shards``.
      start: Leave out events before this time; None: none.
      deleted: (U,) int64, ascending: users whose events are left out.
      generation: The number of the next generation, which deletes them.

    Attributes:
      deletions: The users whose events were ever deleted.
      deleted: How many of `deleted` are in this shard.
    """

    def __init__(
        self,
        before: Generation,
        shard: int,
        spec: HistorySpec,
        *,
        start: int | None,
        deleted: Ints,
        generation: int,
    ) -> None:
        self._before, self._spec, self._start = before, spec, _ALL.min if start is None else start
        self._parts: list[tuple[ShardReader, Ints]] = []
        self._open, self.deleted, deletions = ExitStack(), 0, []
        there = len(before.manifest.shards)
        for number in range(shard * there // spec.shards, -(-(shard + 1) * there // spec.shards)):
            reader = self._open.enter_context(closing(before.open(number)))
            index = reader.index()
            own = user_shards(index.users, spec.shards) == shard
            has_events = np.diff(index.ends, prepend=0) > 0
            named = own & has_events & np.isin(index.users, deleted)
            by = np.where(named, generation, index.deletions)
            deletions.append(Deletions(index.users[own & (by > 0)], by[own & (by > 0)]))
            self._parts.append((reader, index.users[own & ~named]))
            self.deleted += int(named.sum())
        self.deletions = Deletions(*(np.concatenate(parts) for parts in zip(*deletions, strict=True)))

    def __enter__(self) -> OldShard:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def tables(self) -> Iterator[list[Ints]]:
        """Yield the columns of each new group: user, time, birth and its own, ordered by the first three.

        Raises:
          DataError: A stripe is damaged.
        """
        for names in self._spec.groups.values():
            parts = [self._read(reader, users, names) for reader, users in self._parts]
            columns = [np.concatenate(each) for each in zip(*parts, strict=True)]
            if len(parts) > 1:
                order = np.argsort(columns[0], kind="stable")
                columns = [column[order] for column in columns]
            yield columns

    def _read(self, reader: ShardReader, users: Ints, names: Sequence[str]) -> list[Ints]:
        requests = np.zeros(len(users), REQUEST)
        requests["user"], requests["start"] = users, self._start
        requests["until"] = requests["generation"] = _ALL.max
        found: dict[str, Ints] = {}
        first: list[Ints] = []
        for group, columns in enumerate(self._before.manifest.groups.values()):
            wanted = [(number, each.name) for number, each in enumerate(columns, 2) if each.name in names]
            if not wanted and (first or group < len(self._before.manifest.groups) - 1):
                continue
            numbers = [number for number, _ in wanted]
            histories = reader.scan(requests, [0, 1, *numbers], group=group, longest=_ALL.max)
            first = [np.repeat(users, np.diff(histories.row_splits)), *histories.columns[:2]]
            found |= {name: own for (_, name), own in zip(wanted, histories.columns[2:], strict=True)}
        added = {name: default_word(self._spec.columns[name]) for name in names if name not in found}
        found |= {name: np.full(len(first[0]), word) for name, word in added.items()}
        return [*first, *(found[name] for name in names)]
