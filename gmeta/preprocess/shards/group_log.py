"""The log of a shard's groups, kept while the shard is written."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.group_index import ENTRY, GroupIndex, Layout
from gmeta.preprocess.shards.record_encoder import GroupRuns


class SplitGroupError(ValueError):
    """The error for a group that was written before and begins again at ``row``."""

    def __init__(self, row: int, key: tuple[int, int]) -> None:
        self.row, self.key = row, key
        super().__init__(row, key)


class GroupLog:
    """A log that cuts rows into groups, each a run of one key, and refuses a key that comes again.

    Args:
      may_continue: Whether the first rows of the next call may continue the last group.
    """

    def __init__(self, *, may_continue: bool) -> None:
        self._may_continue = may_continue
        self._seen: set[tuple[int, int]] = set()
        self._last: tuple[int, int] | None = None
        self._parts: list[NDArray[Any]] = []
        self._bytes = self._rows = 0

    def runs(self, task: NDArray[np.int64], batch: NDArray[np.int64]) -> GroupRuns:
        """Cut rows with these keys, (N,) each, into groups, without adding the groups to the log.

        Raises:
          SplitGroupError: A key is in the log already, or its rows aren't consecutive.
        """
        changes = np.flatnonzero((task[1:] != task[:-1]) | (batch[1:] != batch[:-1])) + 1
        starts = np.concatenate([[0], changes]) if len(task) else changes
        keys = list(zip(task[starts].tolist(), batch[starts].tolist(), strict=True))
        continues = self._may_continue and bool(keys) and keys[0] == self._last
        fresh = keys[continues:]
        if len(set(fresh)) < len(fresh) or not self._seen.isdisjoint(fresh):
            seen = set(self._seen)
            for start, key in zip(starts[continues:].tolist(), fresh, strict=True):
                if key in seen:
                    raise SplitGroupError(start, key)
                seen.add(key)
        sizes, crcs = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.uint32)
        if continues:
            sizes[0] = self._bytes - self._parts[-1]["offset"][-1]
            crcs[0] = self._parts[-1]["crc"][-1]
        ends = np.append(starts[1:], len(task)).astype(np.int64) if len(task) else starts
        return GroupRuns(ends, sizes, crcs, keys, continues)

    def add(self, runs: GroupRuns) -> None:
        """Add groups that have been written to the log."""
        if not runs.keys or runs.sizes is None:
            return
        rows = np.diff(runs.ends, prepend=0)
        if runs.continues:
            last = self._parts[-1]
            self._bytes, self._rows = int(last["offset"][-1]), int(last["first_row"][-1])
            rows[0] += last["rows"][-1]
            self._parts[-1] = last[:-1]
        entries = np.zeros(len(rows), ENTRY)
        entries["offset"] = self._bytes + np.cumsum(runs.sizes) - runs.sizes
        entries["first_row"] = self._rows + np.cumsum(rows) - rows
        entries["rows"], entries["crc"] = rows, runs.crcs
        entries["task"], entries["batch_id"] = np.array(runs.keys, np.int64).T
        self._parts.append(entries)
        self._bytes += int(runs.sizes.sum())
        self._rows += int(rows.sum())
        self._seen.update(runs.keys)
        self._last = runs.keys[-1]

    @property
    def groups(self) -> int:
        """The number of groups in the log."""
        return sum(len(part) for part in self._parts)

    def index(self, layout: Layout) -> GroupIndex:
        """Build the index of the groups in the log."""
        return GroupIndex(layout, self._bytes, np.concatenate([np.zeros(0, ENTRY), *self._parts]))
