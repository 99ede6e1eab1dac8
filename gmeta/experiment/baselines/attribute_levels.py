r"""Levels of items by ridge regression on their attributes: what a new item's mean is expected to be.

An item's level is what its attributes :math:`a_i` say, and how far it lies off that. All of it is found
jointly: the levels minimise, over all warm rows r of item i(r) and task t(r),

.. math:: \sum_r (y_r - \mu - l_{i(r)} - b_{t(r)})^2 + \lambda |\beta|^2 + d_i \sum_i b_i^2
   + d_t \sum_t b_t^2, \quad l_i = a_i^T \beta + b_i

An item without warm rows has :math:`b_i = 0`: its level is that of its attributes. One without attributes has
the damped bias of `gmeta.experiment.baselines.biases`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import csr_matrix, hstack, identity
from scipy.sparse.linalg import LinearOperator, lsmr

from gmeta.experiment.baselines.biases import ITEM_DAMPINGS, FittedBiases
from gmeta.experiment.baselines.pseudo_cold import Fold, choose, hide_items, squared_error
from gmeta.experiment.baselines.task_rows import Floats, Ints, Rows

PENALTIES = (30.0, 1.0, 3.0, 10.0, 100.0, 300.0)


@dataclass(frozen=True)
class ItemAttributes:
    r"""The attributes of all items, also of those that no warm row has.

    An item with the n values V in a column has there the row :math:`a_v = 1 / \sqrt n` for v in V, and 0
    elsewhere. So each column says as much of an item, however many values it lists.

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
        """Build the rows from each column's values, item after item, and how many of them each item has."""
        return cls({name: _indicate(*each) for name, each in values.items()})

    @property
    def items(self) -> int:
        """How many items there are."""
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
        """Fit the levels of all items, in place of their biases.

        The unknowns are divided by the roots of their penalties, so that one penalty of 1 holds for all.
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
