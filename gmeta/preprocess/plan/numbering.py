"""Numbering of rows in their tasks if a task's rows lie in several ranges, each of which is sorted alone.

::

    range 0 | range 1 | ...      `number_rows`: the position of each row among its task's rows in the range
       │         │
     counts of each ─────> edges     the second pass: a prefix sum over the ranges
       └──> `place_rows` ──> batch, shard and order of every row

Only the first and the last task of a range can have rows in other ranges. The counts of these tasks, one
record per range, are collected. They give every row's position in its task and its task's size, from which
the plan computes everything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gmeta.preprocess.columns import Columns, Ints, Values, part, single, take
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.table_spec import TableSpec

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
