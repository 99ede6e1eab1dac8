r"""How labels of two items go together in one task.

Over the warm tasks with residuals r (labels less mean and item bias), for items i and j,

.. math:: C_{ij} = \sum_t \sum_{a \ne b \in t,\, i(a) = i,\, i(b) = j} r_a r_b

and :math:`N_{ij}` is the number of terms: no row is paired with itself. Their covariance, drawn to
:math:`c`, the mean of all products, as by :math:`\beta` more pairs of that mean:

.. math:: \Sigma_{ij} = \frac{C_{ij} + \beta c}{N_{ij} + \beta}, \quad
   \Sigma_{ij} - c = \frac{C_{ij} - c N_{ij}}{N_{ij} + \beta}

:math:`c` is the variance of what all rows of a task have in common, the task's own bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import eigsh

from gmeta.experiment.baselines.biases import FittedBiases
from gmeta.experiment.baselines.task_rows import Ints, Rows

Matrix = NDArray[np.float32]

MOST_ITEMS = 3000
"""So many items have pairs, those with most warm rows; two tables of this width squared are held."""

_FEW = 256  # up to this width, all eigenvectors cost little


@dataclass(frozen=True)
class CoRatings:
    """The sums over pairs of rows.

    Attributes:
      slots: (items + 1,) an item's row and column in the tables; the last one, of zeros, is for items
        without pairs.
      products: (slots, slots) :math:`C - cN`, float32.
      counts: (slots, slots) :math:`N`, float32.
      common: :math:`c`, at least a thousandth of ``variance``.
      variance: The mean squared residual.
    """

    slots: Ints
    products: Matrix
    counts: Matrix
    common: float
    variance: float

    @classmethod
    def of(cls, warm: Rows, biases: FittedBiases, most: int = MOST_ITEMS) -> CoRatings:
        """Sum over all pairs of rows in each warm task."""
        residuals, task, sizes = biases.residuals(warm), warm.task, warm.sizes
        variance = max(float(np.square(residuals).mean()), 1e-12)
        slots = number_frequent(warm.items, len(biases.item) - 1, most)
        width, place = int(slots.max()) + 1, (task, slots[warm.items])
        tables = []
        for values in (residuals, np.ones_like(residuals)):
            by_task = csr_matrix((values.astype(np.float32), place), shape=(len(sizes), width))
            table = (by_task.T @ by_task).toarray()
            table[np.diag_indices(width)] -= np.bincount(place[1], weights=values**2, minlength=width)
            table[-1] = table[:, -1] = 0
            tables.append(table)
        sums = np.bincount(task, weights=residuals, minlength=len(sizes))
        squares = np.bincount(task, weights=residuals**2, minlength=len(sizes))
        # Tasks weigh by their rows, not by their pairs: else the longest would decide alone.
        each = (sums**2 - squares) / np.maximum(sizes - 1, 1)
        common = max(float(each.sum() / max(sizes[sizes > 1].sum(), 1)), variance / 1000)
        return cls(slots, tables[0] - np.float32(common) * tables[1], tables[1], common, variance)

    def vectors(self, shrinkage: float, most: int) -> Matrix:
        r"""Compute the vectors of items whose products come closest to :math:`\Sigma - c`.

        Args:
          shrinkage: :math:`\beta`.
          most: Width of the vectors at most: one eigenvector each, those of the largest eigenvalues above 0.

        Returns:
          (slots, width), largest eigenvalue first; the last slot's are 0.
        """
        centred = self.products / (self.counts + np.float32(shrinkage))
        width = len(centred)
        if width <= max(_FEW, 3 * most):
            values, found = eigh(centred, subset_by_index=[max(width - most, 0), width - 1])
        else:
            values, found = eigsh(centred, k=most, which="LA", v0=np.ones(width, np.float32), tol=1e-3)
        order = np.argsort(-values)
        vectors = found[:, order] * np.sqrt(np.maximum(values[order], 0))
        vectors[-1] = 0
        return np.asarray(vectors, np.float32)


def number_frequent(used: Ints, items: int, most: int) -> Ints:
    """Number the ``most`` items with most rows from 0; all others, and unknown ones, get the number after.

    Args:
      used: (rows,) the items of the warm rows, each below ``items``.
      items: How many items there are.
      most: How many get a number of their own.

    Returns:
      (items + 1,).
    """
    frequent = np.argsort(-np.bincount(used, minlength=items)[:items], kind="stable")[:most]
    slots = np.full(items + 1, len(frequent))
    slots[frequent] = np.arange(len(frequent))
    return slots
