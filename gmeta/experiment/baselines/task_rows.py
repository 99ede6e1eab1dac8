"""The rows of many tasks as flat arrays: the form in which baselines see them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows, task after task, in each task from the oldest to the latest.

    Attributes:
      items: (rows,) numbers of the items, from 0; `ItemNumbers` counts them.
      labels: (rows,).
      row_splits: (tasks + 1,) where each task's rows begin and end.

    Example:
      >>> rows = Rows(np.array([3, 1, 3]), np.array([5.0, 4.0, 1.0]), np.array([0, 2, 3]))
      >>> rows.latest(1).items, rows.choose(np.array([1])).labels
      (array([1, 3]), array([1.]))
    """

    items: Ints
    labels: Floats
    row_splits: Ints

    @property
    def sizes(self) -> Ints:
        """How many rows each task has, (tasks,)."""
        return np.diff(self.row_splits)

    @property
    def task(self) -> Ints:
        """The number of each row's task, (rows,)."""
        return np.repeat(np.arange(len(self.row_splits) - 1), self.sizes)

    def latest(self, size: int) -> Rows:
        """Return each task's last ``size`` rows; all of a task that has fewer."""
        return self._keep(np.repeat(self.row_splits[1:], self.sizes) - np.arange(len(self.items)) <= size)

    def join(self, others: Rows) -> Rows:
        """Return the tasks, and then the other tasks."""
        splits = np.concatenate([self.row_splits, others.row_splits[1:] + self.row_splits[-1]])
        return Rows(
            np.concatenate([self.items, others.items]), np.concatenate([self.labels, others.labels]), splits
        )

    def choose(self, tasks: Ints) -> Rows:
        """Return the rows of some tasks, in the order of ``tasks``."""
        sizes = self.sizes[tasks]
        splits = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        take = np.arange(splits[-1]) + np.repeat(self.row_splits[:-1][tasks] - splits[:-1], sizes)
        return Rows(self.items[take], self.labels[take], splits)

    def _keep(self, kept: NDArray[np.bool_]) -> Rows:
        before = np.concatenate([[0], np.cumsum(kept)])
        return Rows(self.items[kept], self.labels[kept], before[self.row_splits].astype(np.int64))


@dataclass(frozen=True)
class Tasks:
    """Tasks, each cut into the support rows that are given and the query rows to predict.

    Of a task that is only fitted to, all rows are support rows.

    Attributes:
      support: Their support rows.
      query: Their query rows, of the same tasks in the same order.
    """

    support: Rows
    query: Rows

    def __len__(self) -> int:
        return len(self.query.row_splits) - 1

    def latest(self, size: int) -> Tasks:
        """Return the tasks with no more than their last ``size`` support rows."""
        return Tasks(self.support.latest(size), self.query)

    def choose(self, tasks: Ints) -> Tasks:
        """Return some of the tasks."""
        return Tasks(self.support.choose(tasks), self.query.choose(tasks))

    def and_whole(self, rows: Rows) -> Tasks:
        """Return these tasks, and then others that are only fitted to."""
        none = Rows(rows.items[:0], rows.labels[:0], np.zeros_like(rows.row_splits))
        return Tasks(self.support.join(rows), self.query.join(none))

    @property
    def asked(self) -> Ints:
        """The numbers of the tasks that have query rows, ascending."""
        return np.flatnonzero(self.query.sizes)

    def whole(self) -> Rows:
        """Return all rows of each task, support rows first."""
        sizes = self.support.sizes + self.query.sizes
        task = np.concatenate([self.support.task, self.query.task])
        order = np.argsort(task, kind="stable")
        items = np.concatenate([self.support.items, self.query.items])[order]
        labels = np.concatenate([self.support.labels, self.query.labels])[order]
        return Rows(items, labels, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


@dataclass(frozen=True)
class ItemNumbers:
    """The items of the warm rows, numbered from 0 in ascending order of their ids.

    Attributes:
      known: (items,) ids, ascending.

    Example:
      >>> ItemNumbers(np.array([5, 9])).of(np.array([9, 7]))
      array([1, 2])
    """

    known: Ints

    @property
    def unknown(self) -> int:
        """The number of every item that no warm row has: one above the last."""
        return len(self.known)

    def of(self, ids: Ints) -> Ints:
        """Return the items' numbers, of the shape of ``ids``."""
        if not self.unknown:
            return np.zeros(ids.shape, np.int64)
        found = np.minimum(np.searchsorted(self.known, ids), self.unknown - 1)
        return np.where(self.known[found] == ids, found, self.unknown)
