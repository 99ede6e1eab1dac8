r"""k nearest neighbours among the items that a task has rated, by the covariance of their labels.

The weight of support row s for query row q is the covariance of their items' labels beyond the task's bias,
:math:`w = \max(\Sigma_{qs} - c, 0)` (`gmeta.experiment.baselines.vectors`). Among the k rows of largest
weight, with residuals from mean, item bias and task bias,

.. math:: \hat y = \mu + b_q + b_t + \frac{\sum_s w_s (r_s - b_t)}{\sum_s w_s + \lambda v}

v is the variance of residuals, and :math:`\lambda` shrinks predictions from few weak neighbours towards those
of the biases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from gmeta.experiment.baselines.biases import FittedBiases
from gmeta.experiment.baselines.task_rows import Floats, Tasks, cut_blocks
from gmeta.experiment.baselines.vectors import CoRatings

SHRINKAGES, SIZES, DAMPINGS = (100.0, 10.0, 30.0, 300.0), (40, 5, 10, 20), (0.2, 0.1, 0.4, 0.8)


@dataclass(frozen=True)
class Neighbours:
    r"""The settings of nearest neighbours.

    Attributes:
      size: The maximum number of support rows that count.
      shrinkage: The number of pairs of the overall mean towards which a covariance is shrunk.
      damping: :math:`\lambda`.
    """

    size: int
    shrinkage: float
    damping: float

    @classmethod
    def grid(cls) -> list[Neighbours]:
        """Return the settings to choose from."""
        return [cls(*each) for each in product(SIZES, SHRINKAGES, DAMPINGS)]

    def fit(self, biases: FittedBiases, pairs: CoRatings) -> FittedNeighbours:
        """Combine the settings with the biases and the pairs of the warm rows."""
        return FittedNeighbours(self, biases, pairs)


@dataclass(frozen=True)
class FittedNeighbours:
    """Neighbours with the biases and pairs of warm rows."""

    settings: Neighbours
    biases: FittedBiases
    pairs: CoRatings

    def predict(self, tasks: Tasks) -> Floats:
        """Predict the query rows, (rows,)."""
        return predict_each([self.settings], self.biases, self.pairs, tasks)[self.settings]


def predict_each(
    settings: Sequence[Neighbours], biases: FittedBiases, pairs: CoRatings, tasks: Tasks
) -> dict[Neighbours, Floats]:
    """Predict the query rows with each of several settings; pairs are looked up and sorted once.

    Returns:
      Settings -> (rows,).
    """
    support, query = tasks.support, tasks.query
    own = biases.tasks(support)
    rest = biases.residuals(support) - own[support.task]
    start = biases.mean + biases.item[query.items] + own[query.task]
    found = {one: start.copy() for one in settings}
    for block in cut_blocks(tasks):
        rows = pairs.slots[query.items[block.query]][:, :, None]
        columns = pairs.slots[support.items[block.support]][:, None]
        products = np.where(block.given[:, None], np.maximum(pairs.products[rows, columns], 0), 0)
        counts = pairs.counts[rows, columns]
        for shrinkage in dict.fromkeys(one.shrinkage for one in settings):
            sums = _sums(products / (counts + np.float32(shrinkage)), rest[block.support])
            for one in settings:
                if one.shrinkage == shrinkage:
                    total, weight = (each[..., min(one.size, each.shape[-1]) - 1] for each in sums)
                    moved = total / (weight + one.damping * pairs.variance)
                    found[one][block.query[block.asked]] += moved[block.asked]
    return found


def _sums(weights: Floats, rest: Floats) -> tuple[Floats, Floats]:
    """Sum weighted residuals and weights over the 1, 2, ... nearest, each (tasks, q, s)."""
    order = np.argsort(-weights, axis=2, kind="stable")
    nearest = np.take_along_axis(weights, order, axis=2).astype(np.float64)
    residuals = np.take_along_axis(np.broadcast_to(rest[:, None], weights.shape), order, axis=2)
    return np.cumsum(nearest * residuals, axis=2), np.cumsum(nearest, axis=2)


def squared_errors(
    settings: Sequence[Neighbours], biases: FittedBiases, pairs: CoRatings, cold: Tasks
) -> list[float]:
    """Sum the squared errors of the query rows with each of the settings."""
    found: Mapping[Neighbours, Floats] = predict_each(settings, biases, pairs, cold)
    return [float(np.square(found[one] - cold.query.labels).sum()) for one in settings]
