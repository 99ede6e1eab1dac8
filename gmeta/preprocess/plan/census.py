"""The number of tasks of each size, from the counts of ranges; a run's summary needs nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gmeta.core.data.manifest import Shard
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.numbering import RangeCount, edge_sizes
from gmeta.preprocess.plan.outcome import EngineResult


class Census:
    """The numbers of tasks by split and size.

    Args:
      counts: The counts of all ranges that have rows.
      config: The settings.
    """

    def __init__(self, counts: Iterable[RangeCount], config: PlanConfig) -> None:
        counts = list(counts)
        found: Counter[tuple[int, int]] = Counter()
        for count in counts:
            for split, size, tasks in count.inner:
                found[split, size] += tasks
        sizes = edge_sizes(counts)
        splits = plan.split_of(np.array(list(sizes), np.int64), config).tolist()
        for split, size in zip(splits, sizes.values(), strict=True):
            found[split, size] += 1
        self._config = config
        self._split, self._size = np.array(sorted(found), np.int64).reshape(-1, 2).T
        self._tasks = np.array([found[key] for key in sorted(found)], np.int64)

    @property
    def rows(self) -> int:
        """The number of rows of all tasks."""
        return int((self._size * self._tasks).sum())

    @property
    def tasks(self) -> int:
        """The number of all tasks."""
        return int(self._tasks.sum())

    @property
    def task_sizes(self) -> dict[int, int]:
        """Number of rows -> number of tasks with that many rows."""
        found: Counter[int] = Counter()
        for size, tasks in zip(self._size.tolist(), self._tasks.tolist(), strict=True):
            found[size] += tasks
        return dict(sorted(found.items()))

    @property
    def left_out(self) -> dict[str, tuple[int, int]]:
        """Reason -> (rows, tasks) that the selection leaves out, as in `plan.left_out`."""
        found: dict[str, tuple[int, int]] = {}
        for size, tasks in self.task_sizes.items():
            for why, (rows, _) in plan.left_out(np.array([size]), self._config).items():
                before = found.get(why, (0, 0))
                found[why] = before[0] + rows * tasks, before[1] + tasks
        return found

    def of_splits(self) -> dict[str, tuple[int, int, int]]:
        """Count what is kept of each split: split -> (tasks, groups, rows)."""
        kept = plan.select_tasks(self._size, self._config)
        groups = plan.batch_count(self._size, self._config.batch_rows)
        found = {}
        for number, name in enumerate(plan.splits(self._config)):
            tasks = np.where(kept & (self._split == number), self._tasks, 0)
            found[name] = int(tasks.sum()), int((tasks * groups).sum()), int((tasks * self._size).sum())
        return found

    def result(self, shards: Mapping[str, Sequence[Shard]], rows_read: int) -> EngineResult:
        """Return the result of an engine."""
        return EngineResult(
            shards=shards,
            tasks={name: tasks for name, (tasks, _, _) in self.of_splits().items()},
            rows_read=rows_read,
            left_out=self.left_out,
            task_sizes=self.task_sizes,
        )
