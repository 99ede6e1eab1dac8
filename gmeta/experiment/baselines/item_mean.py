r"""The item mean: it knows nothing of the task.

:math:`\mu` is the mean of all warm labels. Item i has :math:`n_i` warm labels:

.. math:: \hat y = \mu + \frac{\sum_{r \in i} (y_r - \mu)}{n_i + d}

The damping d pulls the mean of a few rows towards the mean of all, which an unknown item gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gmeta.experiment.baselines.pseudo_cold import Fold, choose, squared_error
from gmeta.experiment.baselines.task_rows import Floats, Rows, Tasks

DAMPINGS = (5.0, 1.0, 2.0, 10.0, 20.0, 50.0)


@dataclass(frozen=True)
class ItemMean:
    """The settings of the item mean.

    Attributes:
      damping: How many rows with the mean of all labels are added to each item's own.

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
