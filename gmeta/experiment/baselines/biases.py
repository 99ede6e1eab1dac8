r"""Damped biases: the deviation of an item from the overall mean, and of a task's rows from their items.

The biases minimise, over all warm rows r of item i(r) and task t(r),

.. math:: \sum_r (y_r - \mu - b_{i(r)} - b_{t(r)})^2 + d_i \sum_i b_i^2 + d_t \sum_t b_t^2,

alternately: the items' with the tasks' fixed, and vice versa. A new task's bias is fitted to its support:

.. math:: b_t = \frac{\sum_{r \in S_t} (y_r - \mu - b_{i(r)})}{|S_t| + d_t}, \quad \hat y = \mu + b_i + b_t
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from gmeta.experiment.baselines.task_rows import Floats, Fold, Rows, Tasks, choose, squared_error

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
