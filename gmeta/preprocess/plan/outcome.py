"""The result of an engine, and the checks that engines share in addition to the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gmeta.core.data_manifest import Shard
from gmeta.core.errors import DataError
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.ranges import RangeCount, edge_sizes
from gmeta.preprocess.source import (
    NUMBER,
    BadRecord,
    BadRecords,
    Columns,
    Ints,
    Reason,
    Source,
    Values,
    single,
    take,
)
from gmeta.preprocess.summary import count_sizes
from gmeta.preprocess.table_spec import TableSpec


@dataclass(frozen=True)
class EngineResult:
    """The shards that an engine wrote, and the counts that account for every row.

    Attributes:
      shards: Split -> its shards, in order.
      tasks: Split -> number of tasks kept.
      rows_read: The number of records read, bad ones included.
      left_out: Reason -> (rows, tasks) that the selection leaves out.
      task_sizes: Number of rows -> number of tasks with that many rows, before the selection and without bad
        rows.
    """

    shards: Mapping[str, Sequence[Shard]]
    tasks: Mapping[str, int]
    rows_read: int
    left_out: Mapping[str, tuple[int, int]]
    task_sizes: Mapping[int, int]

    @classmethod
    def of(
        cls,
        shards: Mapping[str, Sequence[Shard]],
        source: Source,
        config: PlanConfig,
        tasks: Ints,
        sizes: Ints,
    ) -> EngineResult:
        """Make the result for some shards.

        Args:
          shards: Split -> its shards, in order.
          source: The source that was read.
          config: The settings.
          tasks: (T,) all tasks that have good rows.
          sizes: (T,) the number of good rows of each task.
        """
        return cls(
            shards=shards,
            tasks=kept_tasks(tasks, sizes, config),
            rows_read=source.rows_read,
            left_out=plan.left_out(sizes, config),
            task_sizes=count_sizes(sizes),
        )

    @classmethod
    def together(cls, parts: Sequence[EngineResult]) -> EngineResult:
        """Join the results of partitions that were sorted one after another."""
        reasons = dict.fromkeys(why for part in parts for why in part.left_out)
        of_reason = {why: [part.left_out.get(why, (0, 0)) for part in parts] for why in reasons}
        return cls(
            shards=parts[0].shards,
            tasks={split: count for part in parts for split, count in part.tasks.items()},
            rows_read=sum(part.rows_read for part in parts),
            left_out={
                why: (sum(rows for rows, _ in counts), sum(tasks for _, tasks in counts))
                for why, counts in of_reason.items()
            },
            task_sizes=dict(sorted(sum((Counter(part.task_sizes) for part in parts), Counter()).items())),
        )


def kept_tasks(tasks: Ints, sizes: Ints, config: PlanConfig) -> dict[str, int]:
    """Count the tasks that the selection keeps, split -> count, given all tasks (T,) and their sizes (T,)."""
    names = plan.splits(config)
    if config.partitions:
        return {names[config.partition]: int(plan.select_tasks(sizes, config).sum())}
    counts = np.bincount(plan.split_of(tasks[plan.select_tasks(sizes, config)], config), minlength=len(names))
    return dict(zip(names, counts.tolist(), strict=True))


def refuse_empty_splits(tasks: Ints, sizes: Ints, config: PlanConfig, path: Path) -> None:
    """Raise an error if a split has no task, since it can't be trained on or measured.

    Raises:
      DataError: A split has no task; the message lists why tasks are left out.
    """
    refuse_empty(kept_tasks(tasks, sizes, config), len(tasks), plan.left_out(sizes, config), path)


def refuse_empty(
    kept: Mapping[str, int], tasks: int, left_out: Mapping[str, tuple[int, int]], path: Path
) -> None:
    """Raise an error if a split has no task, as in `refuse_empty_splits`, from counts.

    Args:
      kept: Split -> number of tasks kept.
      tasks: The number of tasks before the selection.
      left_out: Reason -> (rows, tasks) that the selection leaves out.
      path: The path that the error names.
    """
    empty = [split for split, count in kept.items() if not count]
    if empty:
        reasons = [f"{count} left out: {why}" for why, (_, count) in left_out.items()]
        raise DataError(
            f"of {tasks} tasks none is left for {' and '.join(empty)}"
            + (f" ({'; '.join(reasons)})" if reasons else ""),
            path=path,
            advice="choose other bounds with --min-rows, --max-rows or --cold-modulus",
        )


def refuse_repeated(rows: Columns, source: Source, bad: BadRecords) -> dict[str, Values]:
    """Drop rows whose key an earlier row of the task has, and report each of them to ``bad``.

    Args:
      rows: Whole tasks in `plan.row_order`, with `NUMBER`.
      source: The rows' source, which knows their places.
      bad: Applies the rule for bad records.
    """
    again = plan.find_repeated(rows, source.spec.task, source.spec.unique)
    if not again.any():
        return dict(rows)
    for number, message in describe_repeated(take(rows, np.flatnonzero(again)), source.spec):
        path, line, place = source.where(number)
        bad.add(BadRecord(Reason.REPEATED_KEY, place + message), path, line)
    return take(rows, np.flatnonzero(~again))


def describe_repeated(rows: Columns, spec: TableSpec) -> Iterator[tuple[int, str]]:
    """Yield the `NUMBER` of each row that `plan.find_repeated` has found, and a message that describes it."""
    columns = [single(rows, name).tolist() for name in (spec.task, *spec.unique, NUMBER)]
    for task, *key, number in zip(*columns, strict=True):
        said = ", ".join(f"{name} {value}" for name, value in zip(spec.unique, key, strict=True))
        yield number, f"{spec.task} {task} has another row of {said}, which comes first"


# The number of tasks of each size, from the counts of ranges; a run's summary needs nothing else.


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
        """Count the kept data of each split: split -> (tasks, groups, rows)."""
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
