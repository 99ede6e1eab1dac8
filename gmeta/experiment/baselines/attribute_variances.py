r"""What rows of one task have in common, divided among a task's bias and the columns of attributes.

Residuals r of two rows a, b of a task have the covariance

.. math:: K_{ab} = c + \sum_k w_k \langle a^k_{i(a)}, a^k_{i(b)} \rangle + w_0 [i(a) = i(b)],

and each row has noise of variance :math:`\sigma^2` besides. The variances are estimated by moments, as
Haseman-Elston regression does: they are the least squares fit, none below 0, of the products
:math:`r_a r_b` of all pairs of two rows of a warm task. Tasks weigh by their rows, not by their pairs. What
is left of the mean squared residual is :math:`\sigma^2`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls
from scipy.sparse import csr_matrix, hstack, identity

from gmeta.experiment.baselines.attribute_levels import ItemAttributes
from gmeta.experiment.baselines.biases import FittedBiases
from gmeta.experiment.baselines.pseudo_cold import MOST_PAIRS, within
from gmeta.experiment.baselines.task_blocks import cut_blocks, multiply
from gmeta.experiment.baselines.task_rows import Floats, Rows, Tasks

MOST_ROWS = 1000
"""So many of a task's latest rows count."""


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
        """Estimate the variances from the warm rows; a random part of the tasks if pairs are many."""
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
    # w' L w - 2 w' r is |R w - R'^-1 r|^2 with R'R = L; a part that no pair has in common gets 0.
    root = np.linalg.cholesky(left + 1e-9 * max(float(np.trace(left)), 1.0) * np.eye(len(left))).T
    return np.asarray(nnls(root, np.linalg.solve(root.T, right))[0])
