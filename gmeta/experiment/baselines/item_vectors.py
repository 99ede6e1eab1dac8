r"""Ridge regression of a task's labels on vectors of its items: what kriging and factors predict by.

A task has a vector u of its own, drawn from N(0, I), and a row of item i has the label

.. math:: y = \mu + b_i + x_i^T u + \varepsilon, \quad \varepsilon \sim N(0, \sigma^2)

Given the support rows S with residuals r, the posterior of u is a ridge regression:

.. math:: A = I + \sum_S x x^T / \sigma^2, \quad \bar u = A^{-1} \sum_S x r / \sigma^2

so that :math:`\hat y = \mu + b_i + x_i^T \bar u`, with variance :math:`\sigma^2 + x_i^T A^{-1} x_i`. It is
the same as kriging with the covariance :math:`X X^T` of items, without a matrix of the support's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from gmeta.experiment.baselines.task_rows import Floats, Ints, Rows, Tasks

AT_ONCE = 4096
"""Tasks whose matrices are held together."""


@dataclass(frozen=True)
class ItemVectors:
    r"""Biases and vectors of items.

    Attributes:
      mean: The mean of all labels.
      bias: (items + 1,); the last is of unknown items.
      slots: (items + 1,) which vector an item has.
      vectors: (slots, width).
      noise: :math:`\sigma^2`.

    Example:
      >>> fitted = ItemVectors(3.0, np.zeros(2), np.array([0, 1]), np.array([[1.0], [1.0]]), noise=1.0)
      >>> support = Rows(np.array([0]), np.array([5.0]), np.array([0, 1]))
      >>> tasks = Tasks(support, Rows(np.array([1]), np.zeros(1), np.array([0, 1])))
      >>> fitted.predict(tasks), fitted.variance(tasks)
      (array([4.]), array([1.5]))
    """

    mean: float
    bias: Floats
    slots: Ints
    vectors: Floats
    noise: float

    def predict(self, tasks: Tasks) -> Floats:
        """Predict the query rows, (rows,)."""
        found = []
        for part, support in self._parts(tasks):
            means = np.linalg.solve(*self._normal(support))[..., 0]
            found.append(np.einsum("rk,rk->r", self._of(part.query), means[part.query.task]))
        return self.mean + self.bias[tasks.query.items] + np.concatenate([np.zeros(0), *found])

    def variance(self, tasks: Tasks) -> Floats:
        """Compute the variance of the query rows' labels, (rows,), noise included."""
        found = []
        for part, support in self._parts(tasks):
            inverse, wanted = np.linalg.inv(self._normal(support)[0]), self._of(part.query)
            spread = np.matmul(wanted[:, None], inverse[part.query.task])[:, 0]
            found.append(np.einsum("rk,rk->r", spread, wanted))
        return self.noise + np.concatenate([np.zeros(0), *found])

    def _of(self, rows: Rows) -> Floats:
        return self.vectors[self.slots[rows.items]]

    def _parts(self, tasks: Tasks) -> Iterator[tuple[Tasks, Rows]]:
        for start in range(0, len(tasks), AT_ONCE):
            part = tasks.choose(np.arange(start, min(start + AT_ONCE, len(tasks))))
            yield part, part.support

    def _normal(self, support: Rows) -> tuple[Floats, Floats]:
        """Compute both sides of the equations, (tasks, width, width) and (tasks, width, 1)."""
        width, slots = self.vectors.shape[1], self.slots[support.items]
        shape = len(support.sizes), len(self.vectors)
        rest = support.labels - self.mean - self.bias[support.items]
        squares = np.einsum("ij,ik->ijk", self.vectors, self.vectors).reshape(shape[1], -1)
        counts = csr_matrix((np.ones(len(rest)), slots, support.row_splits), shape=shape)
        sums = csr_matrix((rest, slots, support.row_splits), shape=shape)
        left = (counts @ squares).reshape(-1, width, width) / self.noise + np.eye(width)
        return left, (sums @ self.vectors)[..., None] / self.noise
