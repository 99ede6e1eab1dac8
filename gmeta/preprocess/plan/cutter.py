"""Cutting of sorted rows into batches, one part at a time, with as few rows in memory as possible."""

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
    enough rows, and doesn't process them twice in vain, however large a batch is.

    Args:
      spec: The columns, as `TableSpec.resolve` decided them.
      config: The settings.
      tasks: (T,) the tasks whose rows will come, ascending.
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
        if first and after[0] == batch[-1]:  # more rows of the last batch will come
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
