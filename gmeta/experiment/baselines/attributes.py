r"""Damped biases, and ridge on attributes, which predicts an item's level, and a task's deviation from it.

By ridge on attributes, an item has the level :math:`l_i`; a new item has one as well. A task's rows deviate
from it by a Gaussian process over attributes with covariance K and noise :math:`\sigma^2`, conditioned on the
support rows S:

.. math:: \hat y_q = \mu + l_q + K_{qS} (K_{SS} + \sigma^2 I)^{-1} r_S, \quad
   \mathrm{var}_q = \sigma^2 + K_{qq} - K_{qS} (K_{SS} + \sigma^2 I)^{-1} K_{Sq}

This is a ridge regression of a task's residuals on attributes, whose matrix has the support's size. A task's
own attributes, such as a user's age, aren't used: on MovieLens they didn't improve predictions. The variance
treats levels as known, and is too small for new items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.sparse import csr_matrix, hstack, identity
from scipy.sparse.linalg import LinearOperator, lsmr

from gmeta.experiment.baselines.task_rows import (
    MOST_PAIRS,
    Block,
    Floats,
    Fold,
    Ints,
    Rows,
    Tasks,
    choose,
    cut_blocks,
    hide_items,
    multiply,
    squared_error,
    within,
)
from gmeta.preprocess.source import Values

# Damped biases: the deviation of an item from the overall mean, and of a task's rows from their items.
#
# The biases minimise, over all warm rows r of item i(r) and task t(r),
#
# .. math:: \sum_r (y_r - \mu - b_{i(r)} - b_{t(r)})^2 + d_i \sum_i b_i^2 + d_t \sum_t b_t^2,
#
# alternately: the items' with the tasks' fixed, and vice versa. A new task's bias is fitted to its support:
#
# .. math:: b_t = \frac{\sum_{r \in S_t} (y_r - \mu - b_{i(r)})}{|S_t| + d_t}, \quad
#    \hat y = \mu + b_i + b_t

ITEM_DAMPINGS, TASK_DAMPINGS = (5.0, 1.0, 2.0, 10.0, 20.0), (5.0, 1.0, 2.0, 10.0, 20.0)
TURNS = 5


@dataclass(frozen=True)
class Biases:
    """The settings of damped biases.

    Attributes:
      item_damping: :math:`d_i`, in rows.
      task_damping: :math:`d_t`, in rows.

    Example:
      >>> warm = Rows(np.array([0, 1]), np.array([2.0, 4.0]), np.array([0, 2]))
      >>> fitted = Biases(item_damping=1.0, task_damping=1.0).fit(warm, items=2)
      >>> task = Tasks(warm.choose(np.array([0])), Rows(np.array([2]), np.zeros(1), np.array([0, 1])))
      >>> fitted.item, fitted.predict(task)
      (array([-0.5,  0.5,  0. ]), array([3.]))
    """

    item_damping: float
    task_damping: float

    @classmethod
    def tune(cls, folds: Sequence[Fold], items: int) -> Biases:
        """Choose both dampings by the squared error on pseudo-cold tasks."""
        every = [cls(*dampings) for dampings in product(ITEM_DAMPINGS, TASK_DAMPINGS)]
        return choose(
            every, ([squared_error(one.fit(f.warm, items), f.cold) for one in every] for f in folds)
        )

    def fit(self, warm: Rows, items: int) -> FittedBiases:
        """Fit the biases; ``items`` is the number of the unknown item, whose bias is 0."""
        mean, task, sizes = float(warm.labels.mean()), warm.task, warm.sizes
        labels, counts = warm.labels - mean, np.bincount(warm.items, minlength=items + 1)
        own = np.zeros(len(sizes))
        for _ in range(TURNS):
            rest = np.bincount(warm.items, weights=labels - own[task], minlength=items + 1)
            item = rest / (counts + self.item_damping)
            rest = np.bincount(task, weights=labels - item[warm.items], minlength=len(sizes))
            own = rest / (sizes + self.task_damping)
        return FittedBiases(mean, item, self.task_damping)


@dataclass(frozen=True)
class FittedBiases:
    """The mean and the items' biases.

    Attributes:
      mean: The mean of all warm labels.
      item: (items + 1,) the last for unknown items.
      task_damping: In rows.
    """

    mean: float
    item: Floats
    task_damping: float

    def residuals(self, rows: Rows) -> Floats:
        """Compute the residuals of labels from mean and item bias, (rows,)."""
        return rows.labels - self.mean - self.item[rows.items]

    def tasks(self, support: Rows) -> Floats:
        """Compute the biases of tasks, (tasks,), from their support rows."""
        rest = np.bincount(support.task, weights=self.residuals(support), minlength=len(support.sizes))
        return rest / (support.sizes + self.task_damping)

    def predict(self, tasks: Tasks) -> Floats:
        """Predict the query rows, (rows,): mean, item bias and task bias."""
        return self.mean + self.item[tasks.query.items] + self.tasks(tasks.support)[tasks.query.task]


# The item mean, which ignores the task.
#
# :math:`\mu` is the mean of all warm labels. Item i has :math:`n_i` warm labels:
#
# .. math:: \hat y = \mu + \frac{\sum_{r \in i} (y_r - \mu)}{n_i + d}
#
# The damping d pulls the mean of a few rows towards the mean of all, which is the mean of an unknown item.

DAMPINGS = (5.0, 1.0, 2.0, 10.0, 20.0, 50.0)


@dataclass(frozen=True)
class ItemMean:
    """The settings of the item mean.

    Attributes:
      damping: The number of rows with the overall mean label that are added to each item's rows.

    Example:
      >>> warm = Rows(np.array([0, 0, 1]), np.array([1.0, 2.0, 3.0]), np.array([0, 3]))
      >>> ItemMean(damping=1.0).fit(warm, items=2).means
      array([1.66666667, 2.5       , 2.        ])
    """

    damping: float

    @classmethod
    def tune(cls, folds: Sequence[Fold], items: int) -> ItemMean:
        """Choose the damping by the squared error on pseudo-cold tasks."""
        every = [cls(damping) for damping in DAMPINGS]
        return choose(
            every, ([squared_error(one.fit(f.warm, items), f.cold) for one in every] for f in folds)
        )

    def fit(self, warm: Rows, items: int) -> FittedItemMean:
        """Compute the means; ``items`` is the number of the unknown item."""
        mean = float(warm.labels.mean())
        sums = np.bincount(warm.items, weights=warm.labels - mean, minlength=items + 1)
        return FittedItemMean(mean + sums / (np.bincount(warm.items, minlength=items + 1) + self.damping))


@dataclass(frozen=True)
class FittedItemMean:
    """The damped means.

    Attributes:
      means: (items + 1,) the last for unknown items.
    """

    means: Floats

    def predict(self, tasks: Tasks) -> Floats:
        """Return the mean of each query row's item, (rows,)."""
        return self.means[tasks.query.items]


# Levels of items by ridge regression on their attributes: the expected mean of an item, also of a new one.
#
# An item's level is predicted from its attributes :math:`a_i`, plus the item's deviation. All are fitted
# jointly: the levels minimise, over all warm rows r of item i(r) and task t(r),
#
# .. math:: \sum_r (y_r - \mu - l_{i(r)} - b_{t(r)})^2 + \lambda |\beta|^2 + d_i \sum_i b_i^2
#    + d_t \sum_t b_t^2, \quad l_i = a_i^T \beta + b_i
#
# An item without warm rows has :math:`b_i = 0`: its level follows from its attributes. One without attributes
# has the damped bias above.

MOST_CHANGED = 0.05
"""If items have other values in a larger share of later rows, a column isn't an attribute of items."""


def mark_rows(values: NDArray[Any], counts: Ints) -> Floats:
    """Compute a number for each row; rows with the same values, in any order, get the same number."""
    mixed = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    return np.bincount(np.repeat(np.arange(len(counts)), counts), mixed, len(counts)).astype(np.float64)


def values_of(values: Values) -> tuple[Ints, Ints]:
    """Return the values of a column of rows, and how many each row has."""
    if isinstance(values, tuple):
        return values[0], np.diff(values[1])
    return values, np.ones(len(values), np.int64)


def belongs(values: Values, first: Ints) -> bool:
    """Return whether a column belongs to the owners of rows; ``first`` is the place of each one's first row.

    The share of rows that differ from their owner's first row is at most `MOST_CHANGED` times the share of
    pairs of any two rows that differ.
    """
    flat, counts = values_of(values)
    if flat.dtype == np.float32:
        flat = np.ascontiguousarray(flat).view(np.uint32)
    marks = np.unique(mark_rows(flat, counts), return_inverse=True)[1]
    again = first != np.arange(len(first))
    if not again.any():
        return False
    differ = 1 - float(np.square(np.bincount(marks) / len(marks)).sum())
    changed = float(np.mean(marks[again] != marks[first[again]]))
    return differ > 0 and changed <= MOST_CHANGED * differ


PENALTIES = (30.0, 1.0, 3.0, 10.0, 100.0, 300.0)


@dataclass(frozen=True)
class ItemAttributes:
    r"""The attributes of all items, including those that no warm row has.

    For an item with n values V in a column, the row is :math:`a_v = 1 / \sqrt n` for v in V, and 0
    elsewhere. So each column has the same weight for an item, however many values it lists.

    Attributes:
      columns: Name of a column -> (items, values), float64.

    Example:
      >>> genres = np.array([7, 7, 3]), np.array([1, 2])  # item 0 has genre 7, item 1 has 7 and 3
      >>> ItemAttributes.of({"genre": genres}).columns["genre"].toarray().round(2)
      array([[0.  , 1.  ],
             [0.71, 0.71]])
    """

    columns: Mapping[str, csr_matrix]

    @classmethod
    def of(cls, values: Mapping[str, tuple[Ints, Ints]]) -> ItemAttributes:
        """Build the rows from each column's values, item after item, and each item's number of values."""
        return cls({name: _indicate(*each) for name, each in values.items()})

    @property
    def items(self) -> int:
        """The number of items."""
        return int(next(iter(self.columns.values())).shape[0])


def _indicate(values: Ints, counts: Ints) -> csr_matrix:
    ids, column = np.unique(values, return_inverse=True)
    splits = np.concatenate([[0], np.cumsum(counts)])
    entries = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts)
    return csr_matrix((entries, column, splits), shape=(len(counts), len(ids)))


@dataclass(frozen=True)
class Levels:
    r"""The settings of levels.

    Attributes:
      penalty: :math:`\lambda`, in rows.
      item_damping: :math:`d_i`, in rows.
      task_damping: :math:`d_t`, in rows.
    """

    penalty: float
    item_damping: float
    task_damping: float

    @classmethod
    def tune(cls, folds: Sequence[Fold], attributes: ItemAttributes, task_damping: float) -> Levels:
        """Choose the item damping on pseudo-cold tasks, then the penalty on such tasks with new items."""

        def best(every: list[Levels], folds: Sequence[Fold]) -> Levels:
            return choose(
                every,
                (
                    [squared_error(one.fit(fold.warm, attributes), fold.cold) for one in every]
                    for fold in folds
                ),
            )

        damped = best([cls(PENALTIES[0], damping, task_damping) for damping in ITEM_DAMPINGS], folds)
        hidden = [hide_items(fold, attributes.items, turn) for turn, fold in enumerate(folds)]
        return best([replace(damped, penalty=penalty) for penalty in PENALTIES], hidden)

    def fit(self, warm: Rows, attributes: ItemAttributes) -> FittedBiases:
        """Fit the levels of all items, which replace their biases.

        The unknowns are scaled by the roots of their penalties, so that a penalty of 1 applies to all.
        """
        mean = float(warm.labels.mean())
        items, tasks, task = attributes.items, len(warm.sizes), warm.task
        known = [each / np.sqrt(self.penalty) for each in attributes.columns.values()]
        level = csr_matrix(hstack([*known, identity(items) / np.sqrt(self.item_damping)]))
        across, width, scale = level.T.tocsr(), level.shape[1], 1 / np.sqrt(self.task_damping)

        def of_rows(unknowns: Floats) -> Floats:
            own = np.asarray(unknowns).ravel()
            return (level @ own[:width])[warm.items] + scale * own[width:][task]

        def of_unknowns(rows: Floats) -> Floats:
            rest = np.asarray(rows).ravel()
            sums = [np.bincount(where, rest, size) for where, size in ((warm.items, items), (task, tasks))]
            return np.concatenate([across @ sums[0], scale * sums[1]])

        shape = len(warm.labels), width + tasks
        operator = LinearOperator(shape, matvec=of_rows, rmatvec=of_unknowns, dtype=np.float64)
        found = lsmr(operator, warm.labels - mean, damp=1.0, atol=1e-7, btol=1e-7, maxiter=1000)[0]
        return FittedBiases(mean, level @ found[:width], self.task_damping)


# The covariance of rows of one task, split between the task's bias and the columns of attributes.
#
# Residuals r of two rows a, b of a task have the covariance
#
# .. math:: K_{ab} = c + \sum_k w_k \langle a^k_{i(a)}, a^k_{i(b)} \rangle + w_0 [i(a) = i(b)],
#
# and each row also has noise of variance :math:`\sigma^2`. The variances are estimated by moments, as in
# Haseman-Elston regression: they are the non-negative least squares fit to the products :math:`r_a r_b` of
# all pairs of two rows of a warm task. Tasks are weighted by their rows, not by their pairs. The rest of the
# mean squared residual is :math:`\sigma^2`.

MOST_ROWS = 1000
"""The number of a task's latest rows that count."""


@dataclass(frozen=True)
class Variances:
    r"""The vectors of items whose products are the covariance, and the noise.

    Attributes:
      vectors: (items, width) :math:`\sqrt c`, then each column's :math:`\sqrt{w_k} a^k_i`, then
        :math:`\sqrt{w_0}` in a place of the item's own.
      noise: :math:`\sigma^2`, at least a thousandth of the mean squared residual.
    """

    vectors: csr_matrix
    noise: float

    @classmethod
    def of(cls, warm: Rows, levels: FittedBiases, attributes: ItemAttributes) -> Variances:
        """Estimate the variances from the warm rows; if there are many pairs, from random tasks."""
        items = attributes.items
        parts = [csr_matrix(np.ones((items, 1))), *attributes.columns.values(), identity(items, format="csr")]
        weights = _fit(parts, _some(warm), levels)
        vectors = csr_matrix(hstack([np.sqrt(w) * part for w, part in zip(weights, parts, strict=True)]))
        variance = max(float(np.square(levels.residuals(warm)).mean()), 1e-12)
        common = float(norms(vectors)[warm.items].mean())
        return cls(vectors, max(variance - common, 1e-3 * variance))


def norms(vectors: csr_matrix) -> Floats:
    """Compute the squared length of each item's vector, (items,)."""
    return np.asarray(vectors.multiply(vectors).sum(axis=1)).ravel()


def _some(warm: Rows) -> Rows:
    latest = warm.latest(MOST_ROWS)
    order = np.random.default_rng(0).permutation(len(latest.sizes))
    return latest.choose(within(order, latest.sizes**2, MOST_PAIRS))


def _fit(parts: list[csr_matrix], rows: Rows, levels: FittedBiases) -> Floats:
    """Fit the variances to the pairs of two rows: (parts,), none below 0."""
    residuals = levels.residuals(rows)
    left, right = np.zeros((len(parts), len(parts))), np.zeros(len(parts))
    for block in cut_blocks(Tasks(rows, rows)):
        pairs = block.given[:, :, None] & block.given[:, None] & ~np.eye(block.given.shape[1], dtype=bool)
        weight = pairs / np.maximum(block.given.sum(axis=1) - 1, 1)[:, None, None]
        own = np.where(block.given, residuals[block.support], 0)
        each = np.stack([multiply(part, rows, rows, block).ravel() for part in parts])
        weighted = each * weight.ravel()
        left += weighted @ each.T
        right += weighted @ (own[:, :, None] * own[:, None]).ravel()
    # w' L w - 2 w' r is |R w - R'^-1 r|^2 with R'R = L; a part that no pair shares gets 0.
    root = np.linalg.cholesky(left + 1e-9 * max(float(np.trace(left)), 1.0) * np.eye(len(left))).T
    return np.asarray(nnls(root, np.linalg.solve(root.T, right))[0])


@dataclass(frozen=True)
class Attributes:
    """The baseline's settings, with the attributes of items.

    Attributes:
      levels: The settings of levels; the variances need none.
      known: The attributes of all items.
    """

    levels: Levels
    known: ItemAttributes

    @classmethod
    def tune(cls, folds: Sequence[Fold], known: ItemAttributes, task_damping: float) -> Attributes:
        """Choose the settings of levels on pseudo-cold tasks."""
        return cls(Levels.tune(folds, known, task_damping), known)

    def fit(self, warm: Rows) -> FittedAttributes:
        """Fit levels, then variances, to the warm rows."""
        levels = self.levels.fit(warm, self.known)
        return FittedAttributes(levels, Variances.of(warm, levels, self.known))


@dataclass(frozen=True)
class FittedAttributes:
    """Levels and variances; items have the numbers of their attributes."""

    levels: FittedBiases
    variances: Variances

    def predict(self, tasks: Tasks) -> Floats:
        """Predict the query rows, (rows,), from each task's latest `MOST_ROWS` support rows."""
        tasks = tasks.latest(MOST_ROWS)
        found = self.levels.mean + self.levels.item[tasks.query.items]
        residuals = self.levels.residuals(tasks.support)
        for block, inner, across in self._blocks(tasks):
            rest = np.where(block.given, residuals[block.support], 0)
            moved = np.matmul(across, np.linalg.solve(inner, rest[..., None]))[..., 0]
            found[block.query[block.asked]] += moved[block.asked]
        return found

    def variance(self, tasks: Tasks) -> Floats:
        """Compute the variance of the query rows' labels, (rows,), noise included."""
        tasks = tasks.latest(MOST_ROWS)
        found = self.variances.noise + norms(self.variances.vectors)[tasks.query.items]
        for block, inner, across in self._blocks(tasks):
            known = np.einsum("tqs,tsq->tq", across, np.linalg.solve(inner, across.swapaxes(1, 2)))
            found[block.query[block.asked]] -= known[block.asked]
        return found

    def _blocks(self, tasks: Tasks) -> Iterator[tuple[Block, Floats, Floats]]:
        r"""Compute :math:`K_{SS} + \sigma^2 I`, (tasks, s, s), and :math:`K_{qS}`, (tasks, q, s)."""
        for block in cut_blocks(tasks, squares=True):
            support = Block(block.support, block.given, block.support, block.given)
            inner = multiply(self.variances.vectors, tasks.support, tasks.support, support)
            across = multiply(self.variances.vectors, tasks.query, tasks.support, block)
            yield block, inner + self.variances.noise * np.eye(inner.shape[-1]), across
