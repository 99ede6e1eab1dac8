"""The rows of many tasks as flat arrays, in which baselines see them, and their folds for cross-validation.

The settings of baselines are chosen on pseudo-cold tasks: warm tasks held out in turn. The warm tasks are
divided into folds (`cut_folds`). The tasks of a fold stand for new tasks: a baseline is fitted to the rows of
the other folds, sees the support rows of the held-out tasks, and predicts their query rows. Support and query
are cut as in evaluation; a task that isn't cut, because no test task has its size, is only used for fitting.
Items may stand for new ones as well. No test task is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows, task after task; within a task, from the oldest to the latest.

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
        """Return each task's last ``size`` rows, or all if the task has fewer."""
        return self.keep(np.repeat(self.row_splits[1:], self.sizes) - np.arange(len(self.items)) <= size)

    def join(self, others: Rows) -> Rows:
        """Return these tasks followed by the others."""
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

    If a task is only used for fitting, all of its rows are support rows.

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
        """Return these tasks followed by others that are only used for fitting."""
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
    """Numbers of items: those of the warm rows from 0 in ascending order of their ids, then other items.

    Attributes:
      known: (items,) ids, ascending.
      others: (others,) ids that no warm row has, ascending; only attributes distinguish them.

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
        """The first number whose item has no warm row: one above the last item with warm rows."""
        return len(self.known)

    @property
    def ids(self) -> Ints:
        """The ids of all numbered items, by number."""
        return np.concatenate([self.known, self.others])

    def of(self, ids: Ints) -> Ints:
        """Return the items' numbers, shaped like ``ids``; an unknown id gets one above the last number."""
        found = np.full(ids.shape, len(self.known) + len(self.others))
        for first, numbered in ((0, self.known), (len(self.known), self.others)):
            if len(numbered):
                place = np.minimum(np.searchsorted(numbered, ids), len(numbered) - 1)
                found = np.where(numbered[place] == ids, first + place, found)
        return found


# Tasks as rectangles: pairs of a query row and a support row, and their products, for many tasks.


@dataclass(frozen=True)
class Block:
    """Tasks of similar size, padded to rectangles.

    Attributes:
      support: (tasks, s) indices of support rows; 0 in padding.
      given: (tasks, s) whether a support row is real.
      query: (tasks, q) indices of query rows; 0 in padding.
      asked: (tasks, q) whether a query row is real.
    """

    support: Ints
    given: NDArray[np.bool_]
    query: Ints
    asked: NDArray[np.bool_]


def cut_blocks(tasks: Tasks, most: int = 400_000, *, squares: bool = False) -> Iterator[Block]:
    """Cut tasks with support rows into blocks of at most ``most`` pairs of rows; a larger task is a block.

    A task without support rows, or without query rows, is in no block: it has no pairs.

    Args:
      tasks: The tasks.
      most: The maximum number of pairs of a query row and a support row, including padding.
      squares: Whether the bound applies to pairs of two support rows as well.
    """
    given, asked = tasks.support.sizes, tasks.query.sizes
    order = np.lexsort((asked, given))
    order = order[(given[order] > 0) & (asked[order] > 0)]
    start = 0
    while start < len(order):
        end, rows, queries = start, 0, 0
        while end < len(order):
            rows, queries = max(rows, given[order[end]]), max(queries, asked[order[end]])
            if end > start and (end - start + 1) * rows * max(queries, rows * squares) > most:
                break
            end += 1
        chosen = order[start:end]
        yield Block(*_pad(tasks.support, chosen), *_pad(tasks.query, chosen))
        start = end


def _pad(rows: Rows, chosen: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    sizes = rows.sizes[chosen]
    place = np.arange(sizes.max())
    real = place < sizes[:, None]
    return np.where(real, rows.row_splits[:-1][chosen, None] + place, 0), real


def multiply(vectors: csr_matrix, query: Rows, support: Rows, block: Block) -> Floats:
    """Multiply the vector of each query row with those of its task's support rows.

    One sparse product computes the whole block: each task uses separate columns, so that rows of two tasks
    share none.

    Args:
      vectors: (items, width).
      query: The rows that ``block.query`` numbers.
      support: The rows that ``block.support`` numbers.
      block: Some of the tasks.

    Returns:
      (tasks, q, s); 0 in padding.

    Example:
      >>> rows = Rows(np.array([0, 1, 1]), np.zeros(3), np.array([0, 3]))
      >>> (block,) = cut_blocks(Tasks(rows, rows))
      >>> multiply(csr_matrix([[1.0, 0.0], [2.0, 3.0]]), rows, rows, block)
      array([[[ 1.,  2.,  2.],
              [ 2., 13., 13.],
              [ 2., 13., 13.]]])
    """
    asked, given = np.nonzero(block.asked), np.nonzero(block.given)
    items = np.concatenate([query.items[block.query[asked]], support.items[block.support[given]]])
    own = vectors[items]
    task = np.repeat(np.concatenate([asked[0], given[0]]), np.diff(own.indptr))
    used, column = np.unique(own.indices + task * vectors.shape[1], return_inverse=True)
    apart = csr_matrix((own.data, column, own.indptr), shape=(len(items), len(used)))
    first = len(asked[0])
    product = (apart[:first] @ apart[first:].T).tocoo()
    found = np.zeros((*block.asked.shape, block.given.shape[1]))
    found[asked[0][product.row], asked[1][product.row], given[1][product.col]] = product.data
    return found


FOLDS = 3
MOST_ROWS, MOST_PAIRS = 1_000_000, 3_000_000
"""With more warm rows, or more pairs of support and query rows in a fold, a random part of tasks is used."""


class Predictor(Protocol):
    """A fitted baseline, which predicts the query rows of tasks."""

    def predict(self, tasks: Tasks) -> Floats:
        """Predict the query rows, (rows,), from the support rows of their tasks."""
        ...


@dataclass(frozen=True)
class Fold:
    """One fold of cross-validation.

    Attributes:
      warm: All rows of the tasks to fit to.
      cold: The tasks that are held out.
    """

    warm: Rows
    cold: Tasks


def cut_folds(tasks: Tasks, folds: int = FOLDS, seed: int = 0) -> list[Fold]:
    """Divide warm tasks into folds at random, each of which is held out once.

    Args:
      tasks: The warm tasks, cut as in evaluation.
      folds: The number of folds; with fewer tasks, the number of tasks.
      seed: The seed of the draw.

    Returns:
      The folds; none if there are fewer than two tasks.

    Example:
      >>> rows = Rows(np.array([0, 1, 0, 1]), np.arange(4.0), np.array([0, 1, 2, 3, 4]))
      >>> [(len(fold.warm.items), len(fold.cold)) for fold in cut_folds(Tasks(rows, rows), folds=2)]
      [(4, 2), (4, 2)]
    """
    order = np.random.default_rng(seed).permutation(len(tasks))
    order = within(order, tasks.support.sizes + tasks.query.sizes, MOST_ROWS)
    if len(order) < 2:
        return []
    parts = np.array_split(order, min(folds, len(order)))
    pairs = tasks.support.sizes * tasks.query.sizes
    return [
        Fold(
            tasks.choose(np.concatenate([part for other, part in enumerate(parts) if other != turn])).whole(),
            tasks.choose(within(held_out[np.isin(held_out, tasks.asked)], pairs, MOST_PAIRS)),
        )
        for turn, held_out in enumerate(parts)
    ]


def within(order: Ints, cost: Ints, most: int) -> Ints:
    """Return the first tasks, at least two, whose costs sum to at most ``most``."""
    return order[: max(int(np.searchsorted(np.cumsum(cost[order]), most, side="right")), 2)]


def hide_items(fold: Fold, items: int, seed: int) -> Fold:
    """Drop a random third of the items from the rows to fit to, so that they stand for new items."""
    hidden = np.random.default_rng(seed).permutation(items)[: items // 3]
    kept = fold.warm.keep(~np.isin(fold.warm.items, hidden))
    return Fold(kept, fold.cold) if len(kept.items) else fold


def squared_error(predictor: Predictor, cold: Tasks) -> float:
    """Sum the squared errors of the query rows."""
    return float(np.square(predictor.predict(cold) - cold.query.labels).sum())


Settings = TypeVar("Settings")


def choose(settings: Sequence[Settings], errors: Iterable[Sequence[float]]) -> Settings:
    """Return the settings with the least squared error over all folds; without folds, the first ones.

    Args:
      settings: The settings to choose from, the usual choice first.
      errors: For each fold, the sum of squared errors with each of the settings.
    """
    total = np.sum([np.nan_to_num(np.asarray(each), nan=np.inf) for each in errors], axis=0)
    return settings[int(np.argmin(total))] if np.ndim(total) else settings[0]
