"""Cuts sorted rows into batches as they come, a part at a time, without ever holding more than it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.preprocess.columns import Columns, Ints, Values, join_rows, part, row_count, single, take
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.source import NUMBER
from gmeta.preprocess.table_spec import TableSpec


class Cut(NamedTuple):
    """Whole batches.

    Attributes:
      columns: Their rows, one batch after another, with the column of the batch.
      ends: (G,) the row before which each batch ends.
      task: (G,) the task of each.
      batch_id: (G,) its number in the task.
    """

    columns: dict[str, Values]
    ends: Ints
    task: Ints
    batch_id: Ints


class Cutter:
    """Takes rows that are sorted by `TableSpec.presort` and hands out whole batches.

    What it holds back between calls is the batch that isn't complete, and the rows whose order isn't known
    yet because more may come that tie with them: those of one time of one task, or, where keys may not repeat
    in a task, those of the task. How long a batch will be is known from its task's size, so nothing is looked
    at twice in vain, however large a batch is.

    Args:
      spec: The columns, decided.
      config: The settings.
      tasks: (T,) the tasks that rows will come of, ascending.
      sizes: (T,) how many rows each will have, repeated ones not counted.
      without_repeated: Whole tasks in order -> those without repeated keys; used if ``spec.unique``. Tasks
        that the selection leaves out are left out after it.
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
        self._rows = 0  # that are held
        self._wanted = 0  # rows with which the first batch that is held is complete
        self._first = 0  # position in its task of the first row that is held

    def add(self, rows: Columns) -> Cut | None:
        """Take rows that follow those before; hand out the batches that are complete, if any."""
        self._held.append(rows)
        self._rows += row_count(rows)
        return self._cut(last=False) if self._rows > self._wanted else None

    def finish(self) -> Cut | None:
        """Hand out the rest."""
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
        if first and after[0] == batch[-1]:  # more of the last batch is to come
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
        """The first row whose order more rows may change."""
        names = (self._spec.task,) if self._spec.unique else self._spec.presort
        keys = [single(rows, name) for name in names]
        other = np.zeros(len(keys[0]), np.bool_)
        for key in keys:
            other |= key != key[-1]
        places = np.flatnonzero(other)
        return int(places[-1]) + 1 if len(places) else 0


def _changes(key: Ints) -> NDArray[np.bool_]:
    return np.concatenate(([True], key[1:] != key[:-1]))
