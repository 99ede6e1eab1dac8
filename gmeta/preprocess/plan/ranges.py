"""Cutting of the ordered rows into ranges: a worker holds at most one range, however many rows a task has.

::

    rows ──sample──> bounds of the ranges
      └──range_of──> range 0 | range 1 | ...

The bounds of a range are rows, compared as in `plan.row_order`. So a task can be cut anywhere, even between
rows with the same time. The cuts depend on the sampled rows; the final result doesn't (`number_rows`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.source import NUMBER, Columns, Ints, Values, join_rows, part, row_count, single, take
from gmeta.preprocess.table_spec import TableSpec


class Sampler:
    """A sampler that keeps every ``stride``-th row; the stride grows with the number of rows.

    Args:
      most: The largest number of rows to keep.

    Attributes:
      stride: One row of this many is kept.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most, self._next = most, 0
        self._kept: list[Columns] = []
        self.stride = 1

    def add(self, rows: Columns) -> None:
        """Sample the next rows."""
        count = row_count(rows)
        chosen = np.arange(self._next, count, self.stride)
        self._next += len(chosen) * self.stride - count
        if len(chosen):
            self._kept.append(take(rows, chosen))
        while (kept := sum(map(row_count, self._kept))) > self._most:
            rows = join_rows(self._kept)
            self._kept = [take(rows, np.arange(0, kept, 2))]
            self._next += self.stride if kept % 2 else 0
            self.stride *= 2

    def rows(self) -> Columns | None:
        """Return the kept rows, or None if there are none."""
        return join_rows(self._kept) if self._kept else None


def bounds_of(samples: Iterable[tuple[int, Columns]], order: Sequence[str], ranges: int) -> Columns | None:
    """Choose the first row of every range except the first, from samples.

    Args:
      samples: (stride, rows) of several `Sampler`.
      order: The columns that rows are compared by: `TableSpec.order`, or only the task if no task may be cut.
      ranges: The number of ranges to make.
    """
    found = list(samples)
    longest = max((stride for stride, _ in found), default=1)
    thinned = [take(rows, np.arange(0, row_count(rows), longest // stride)) for stride, rows in found]
    if not thinned:
        return None
    rows = join_rows(thinned)
    sorted_rows = plan.row_order(rows, order)
    return take(rows, sorted_rows[np.arange(1, ranges) * len(sorted_rows) // ranges])


def range_of(rows: Columns, bounds: Columns | None, order: Sequence[str]) -> Ints:
    """Return the range of each row (N,): the number of bounds that don't come after it."""
    count = row_count(rows)
    if bounds is None or not row_count(bounds):
        return np.zeros(count, np.int64)
    first = row_count(bounds)
    # Bounds are placed before rows, and sorting is stable: a row that equals a bound follows it.
    sorted_rows = plan.row_order(join_rows([{name: bounds[name] for name in rows}, rows]), order)
    is_row = sorted_rows >= first
    found = np.empty(count, np.int64)
    found[sorted_rows[is_row] - first] = np.cumsum(~is_row)[is_row]
    return found


# Cutting of sorted rows into batches, one part at a time, with as few rows in memory as possible.


class Cut(NamedTuple):
    """Whole batches.

    Attributes:
      columns: The rows of the batches, one batch after another, including the batch column.
      ends: (G,) the row before which each batch ends.
      task: (G,) the task of each batch.
      batch_id: (G,) the number of each batch in its task.
    """

    columns: dict[str, Values]
    ends: Ints
    task: Ints
    batch_id: Ints


class Cutter:
    """A cutter that takes rows sorted by `TableSpec.presort` and returns whole batches.

    Between calls it holds the rows of the incomplete batch, and the rows whose order isn't known yet because
    further rows may tie with them: the rows of one task and time or, if keys may not repeat in a task, all
    rows of the task. The task's size gives the length of a batch in advance, so the cutter waits until it has
    enough rows, and doesn't process rows repeatedly, however large a batch is.

    Args:
      spec: The columns, as `TableSpec.resolve` decided them.
      config: The settings.
      tasks: (T,) the tasks whose rows will be added, ascending.
      sizes: (T,) the number of rows of each task, without repeated ones.
      without_repeated: Takes whole tasks in order and returns their rows without repeated keys; used if
        ``spec.unique``. Tasks that the selection leaves out are dropped afterwards.
    """

    def __init__(
        self,
        spec: TableSpec,
        config: PlanConfig,
        tasks: Ints,
        sizes: Ints,
        without_repeated: Callable[[Columns], dict[str, Values]] = dict,
    ) -> None:
        self._spec, self._config, self._tasks, self._sizes = spec, config, tasks, sizes
        self._without_repeated = without_repeated
        self._held: list[Columns] = []
        self._rows = 0  # the number of rows held
        self._wanted = 0  # the number of rows that complete the first batch held
        self._first = 0  # the position of the first row held in its task

    def add(self, rows: Columns) -> Cut | None:
        """Take the next rows, and return the batches that are complete, if any."""
        self._held.append(rows)
        self._rows += row_count(rows)
        return self._cut(last=False) if self._rows > self._wanted else None

    def finish(self) -> Cut | None:
        """Return the remaining batches, if any."""
        return self._cut(last=True) if self._rows else None

    def _cut(self, *, last: bool) -> Cut | None:
        spec = self._spec
        rows = join_rows(self._held)
        order = plan.row_order(rows, (*spec.order, *({NUMBER} & set(rows))))
        if (order[1:] < order[:-1]).any():
            rows = take(rows, order)
        sure = len(order) if last else self._ties(rows)
        rest = part(rows, sure, len(order))
        rows = part(rows, 0, sure)
        if spec.unique:
            rows = self._without_repeated(rows)
            sizes = self._sizes[np.searchsorted(self._tasks, single(rows, spec.task))]
            rows = take(rows, np.flatnonzero(plan.select_tasks(sizes, self._config)))
        rows.pop(NUMBER, None)
        if not row_count(rows):
            self._hold([rest], self._first, 2 * len(order))
            return None
        task = single(rows, spec.task)
        position = plan.positions(task, self._first)
        size = self._sizes[np.searchsorted(self._tasks, task)]
        batch = plan.batch_of(position, size, self._config.batch_rows)
        starts = np.flatnonzero(_changes(task) | _changes(batch))
        stop = len(task)
        next_row = position[-1:] + 1
        after = plan.batch_of(next_row, size[-1:], self._config.batch_rows)
        first = int(next_row[0]) if next_row[0] < size[-1] else 0
        wanted = 0
        if first and after[0] == batch[-1]:  # more rows of the last batch will follow
            stop, first = int(starts[-1]), int(position[starts[-1]])
            starts = starts[:-1]
            wanted = -(-int(size[-1]) // int(plan.batch_count(size[-1:], self._config.batch_rows)[0]))
        held = [part(rows, stop, len(task)), rest] if stop < len(task) else [rest]
        self._hold(held, first, max(wanted, 2 * row_count(rest)))
        if not len(starts):
            return None
        columns = {**part(rows, 0, stop), spec.batch: batch[:stop]}
        ends = np.append(starts[1:], stop)
        return Cut(columns, ends, task[starts], batch[starts])

    def _hold(self, held: Sequence[Columns], first: int, wanted: int) -> None:
        self._held = [rows for rows in held if row_count(rows)]
        self._rows = sum(map(row_count, self._held))
        self._first, self._wanted = first, wanted

    def _ties(self, rows: Columns) -> int:
        """Return the first row whose order may change with further rows."""
        names = (self._spec.task,) if self._spec.unique else self._spec.presort
        keys = [single(rows, name) for name in names]
        other = np.zeros(len(keys[0]), np.bool_)
        for key in keys:
            other |= key != key[-1]
        places = np.flatnonzero(other)
        return int(places[-1]) + 1 if len(places) else 0


def _changes(key: Ints) -> NDArray[np.bool_]:
    return np.concatenate(([True], key[1:] != key[:-1]))


# Numbering of rows in their tasks if a task's rows lie in several ranges, each of which is sorted alone.
#
# ::
#
#     range 0 | range 1 | ...      `number_rows`: the position of each row among its task's rows in the range
#        │         │
#      counts of each ─────> edges     the second pass: a prefix sum over the ranges
#        └──> `place_rows` ──> batch, shard and order of every row
#
# Only the first and the last task of a range can have rows in other ranges. The counts of these tasks, one
# record per range, are collected. They give every row's position in its task and its task's size, from which
# the plan computes everything else.

POSITION, COUNT = "_gmeta_position", "_gmeta_count"
"""Added columns: a row's position among its task's rows in the range, and the number of those rows."""

PLACE, KEY = "_gmeta_place", "_gmeta_key"
"""Where a row is written: ``split * shards + shard``, and `plan.order_key` with its top bit flipped, so that
it sorts as an int64. Rows of a shard are sorted by (key, task, position)."""


def number_rows(rows: Columns, spec: TableSpec) -> dict[str, Values]:
    """Sort the rows of a range by `plan.row_order`, and add `POSITION` and `COUNT`."""
    rows = take(rows, plan.row_order(rows, spec.order))
    task = single(rows, spec.task)
    starts = np.flatnonzero(np.concatenate(([True], task[1:] != task[:-1])))
    counts = np.diff(np.append(starts, len(task)))
    return {**rows, POSITION: plan.positions(task), COUNT: np.repeat(counts, counts)}


@dataclass(frozen=True)
class RangeCount:
    """The numbers of rows of a range's first and last task, and counts of the tasks in between.

    Attributes:
      number: The number of the range.
      ends: (task, rows) of the first and the last task; one entry if they are the same.
      inner: (split, rows of a task, tasks) for all other tasks, which have all their rows in this range.
    """

    number: int
    ends: tuple[tuple[int, int], ...]
    inner: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, number: int, task: Ints, config: PlanConfig) -> RangeCount:
        """Count a range's rows, at least one, from the rows' tasks (N,), ascending."""
        tasks, sizes = np.unique(task, return_counts=True)
        ends = [(int(tasks[place]), int(sizes[place])) for place in sorted({0, len(tasks) - 1})]
        kinds = np.stack([plan.split_of(tasks[1:-1], config), sizes[1:-1]])
        found, counts = np.unique(kinds, axis=1, return_counts=True)
        inner = zip(*found.tolist(), counts.tolist(), strict=True) if len(counts) else ()
        return cls(number, tuple(ends), tuple(inner))


@dataclass(frozen=True)
class Edge:
    """The facts that a range needs about the other ranges.

    Attributes:
      first: The range's first task.
      before: The number of that task's rows in earlier ranges.
      sizes: (task, rows in all ranges) of the first and the last task.
    """

    first: int
    before: int
    sizes: tuple[tuple[int, int], ...]


def edges(counts: Iterable[RangeCount]) -> dict[int, Edge]:
    """Compute the edge of each range that has rows, by a prefix sum over the ranges in order."""
    ordered = sorted(counts, key=lambda count: count.number)
    sizes = edge_sizes(ordered)
    seen: dict[int, int] = {}
    found = {}
    for count in ordered:
        first = count.ends[0][0]
        of_ends = tuple((task, sizes[task]) for task, _ in count.ends)
        found[count.number] = Edge(first, seen.get(first, 0), of_ends)
        for task, rows in count.ends:
            seen[task] = seen.get(task, 0) + rows
    return found


def edge_sizes(counts: Iterable[RangeCount]) -> dict[int, int]:
    """Compute the sizes of the tasks at the beginning or end of a range."""
    sizes: dict[int, int] = {}
    for count in counts:
        for task, rows in count.ends:
            sizes[task] = sizes.get(task, 0) + rows
    return sizes


def place_rows(rows: Columns, edge: Edge, spec: TableSpec, config: PlanConfig) -> dict[str, Values]:
    """Return the kept rows, with their batches and places.

    Args:
      rows: Numbered rows of one range (`number_rows`), or any part of them.
      edge: The edge of the range.
      spec: The columns.
      config: The settings.

    Returns:
      The columns and the batch, the `POSITION` in the whole task, `PLACE` and `KEY`.
    """
    task, position, size = (single(rows, name) for name in (spec.task, POSITION, COUNT))
    position = np.where(task == edge.first, position + edge.before, position)
    for end, total in edge.sizes:
        size = np.where(task == end, total, size)
    kept = np.flatnonzero(plan.select_tasks(size, config))
    batch = plan.batch_of(position, size, config.batch_rows)
    columns = take({name: rows[name] for name in spec.columns}, kept)
    place = plan.place(task[kept], batch[kept], config)
    return {
        **columns,
        spec.batch: batch[kept],
        POSITION: position[kept],
        PLACE: place.split * config.shards + place.shard,
        KEY: (place.key ^ np.uint64(1 << 63)).view(np.int64),
    }


def runs(values: Ints, columns: Columns) -> Iterator[tuple[int, dict[str, Values]]]:
    """Cut rows where ``values`` (N,) changes, and yield (value, rows)."""
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    for start, stop in itertools.pairwise([0, *changes.tolist(), len(values)]):
        if stop > start:
            yield int(values[start]), part(columns, start, stop)
