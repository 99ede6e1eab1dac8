"""The rows of many tasks as flat arrays: the form in which baselines see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
        return self.keep(np.repeat(self.row_splits[1:], self.sizes) - np.arange(len(self.items)) <= size)

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

    def keep(self, kept: NDArray[np.bool_]) -> Rows:
        """Return the rows where ``kept``, (rows,), is true."""
        before = np.concatenate([[0], np.cumsum(kept)])
        return Rows(self.items[kept], self.labels[kept], before[self.row_splits].astype(np.int64))

    def merge_unknown(self, items: int) -> Rows:
        """Give all items without a warm row, those numbered from ``items`` on, that one number."""
        return Rows(np.minimum(self.items, items), self.labels, self.row_splits)


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

    def merge_unknown(self, items: int) -> Tasks:
        """Give all items without a warm row, those numbered from ``items`` on, that one number."""
        return Tasks(self.support.merge_unknown(items), self.query.merge_unknown(items))

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
    """The items of the warm rows, numbered from 0 in ascending order of their ids, then other items.

    Attributes:
      known: (items,) ids, ascending.
      others: (others,) ids that no warm row has, ascending; only attributes tell them apart.

    Example:
      >>> ItemNumbers(np.array([5, 9])).of(np.array([9, 7]))
      array([1, 2])
      >>> ItemNumbers(np.array([5, 9]), np.array([6, 7])).of(np.array([9, 7]))
      array([1, 3])
    """

    known: Ints
    others: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of_tasks(cls, warm: Tasks, cold: Iterable[Tasks]) -> ItemNumbers:
        """Number the items of warm tasks, and those that only cold tasks have."""
        known = np.unique(warm.whole().items)
        every = [np.unique(tasks.whole().items) for tasks in cold]
        return cls(known, np.setdiff1d(np.concatenate([known[:0], *every]), known))

    @property
    def unknown(self) -> int:
        """The number from which on no item has a warm row: one above the last of those that have."""
        return len(self.known)

    @property
    def ids(self) -> Ints:
        """The ids of all numbered items, by number."""
        return np.concatenate([self.known, self.others])

    def of(self, ids: Ints) -> Ints:
        """Return the items' numbers, of the shape of ``ids``; an id that has none gets one above the last."""
        found = np.full(ids.shape, len(self.known) + len(self.others))
        for first, numbered in ((0, self.known), (len(self.known), self.others)):
            if len(numbered):
                place = np.minimum(np.searchsorted(numbered, ids), len(numbered) - 1)
                found = np.where(numbered[place] == ids, first + place, found)
        return found
