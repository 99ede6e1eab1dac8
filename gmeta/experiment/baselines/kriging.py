r"""Kriging: a Gaussian process over items, which a task's support rows condition.

The labels of a task, less mean and item biases, are normal with covariance :math:`\Sigma_{ij}` between items,
as warm tasks have it (`gmeta.experiment.baselines.co_ratings`), and with noise :math:`\sigma^2` of a row:

.. math:: \hat y_q = \mu + b_q + \Sigma_{qS} (\Sigma_{SS} + \sigma^2 I)^{-1} r_S

A covariance that is estimated pair by pair need not be positive definite, and a prediction by one that isn't
may be anything. So :math:`\Sigma - c` is replaced by the nearest matrix of a low rank without negative
eigenvalues, :math:`\Sigma = c 1 1^T + F F^T`. :math:`\sigma^2` is a share of :math:`v - c`, where v is the
variance of residuals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from gmeta.experiment.baselines.biases import FittedBiases
from gmeta.experiment.baselines.co_ratings import CoRatings, Matrix
from gmeta.experiment.baselines.item_vectors import ItemVectors
from gmeta.experiment.baselines.pseudo_cold import squared_error
from gmeta.experiment.baselines.task_rows import Tasks

SHRINKAGES, RANKS, NOISES = (100.0, 20.0, 50.0, 200.0), (16, 4, 8, 32), (0.9, 0.8, 1.0)


@dataclass(frozen=True)
class Kriging:
    """The settings of kriging.

    Attributes:
      shrinkage: By how many pairs of the mean of all a covariance is shrunk.
      rank: Width of F.
      noise: The share of noise.
    """

    shrinkage: float
    rank: int
    noise: float

    @classmethod
    def grid(cls) -> list[Kriging]:
        """Return the settings to choose from."""
        return [cls(*each) for each in product(SHRINKAGES, RANKS, NOISES)]

    def fit(self, biases: FittedBiases, pairs: CoRatings) -> ItemVectors:
        """Find the vectors of items."""
        return self._with(biases, pairs, pairs.vectors(self.shrinkage, self.rank))

    def _with(self, biases: FittedBiases, pairs: CoRatings, vectors: Matrix) -> ItemVectors:
        common = np.full((len(vectors), 1), np.sqrt(pairs.common))
        noise = max(self.noise * (pairs.variance - pairs.common), 1e-3 * pairs.variance)
        whole = np.concatenate([common, vectors[:, : self.rank]], axis=1).astype(np.float64)
        return ItemVectors(biases.mean, biases.item, pairs.slots, whole, noise)


def squared_errors(
    settings: Sequence[Kriging], biases: FittedBiases, pairs: CoRatings, cold: Tasks
) -> list[float]:
    """Sum the squared errors of the query rows with each of the settings; eigenvectors are found once."""
    widest = max(one.rank for one in settings)
    vectors = {each: pairs.vectors(each, widest) for each in {one.shrinkage for one in settings}}
    return [squared_error(one._with(biases, pairs, vectors[one.shrinkage]), cold) for one in settings]
